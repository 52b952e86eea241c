"""The configuration: its schema with bounds and roles, and what follows from a role."""

# Imported to be imported from here: the files are one part to the rest of the package.
# ruff: noqa: F401

from stability_lab.config.roles import (
    ROLES,
    in_fingerprint,
    in_run_name,
    in_speed_key,
    in_suggestion,
    may_change_on_resume,
    role_of,
    schema_keys,
    tells_arms_apart,
)
from stability_lab.config.schema import (
    OPEN_SETS,
    ConfigError,
    InitConfig,
    ModelConfig,
    Parser,
    RoundingConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainConfig,
    check_bounds,
    config_dir,
    convert,
    from_plain,
    option,
    typed_fields,
)
from stability_lab.config.values import by_value, typed
