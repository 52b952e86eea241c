"""Puts the configs that installed packages bring along on Hydra's search path, after our own."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from stability_lab.plugins.trust import config_folders


class InstalledConfigs(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package, folder in config_folders().items():
            search_path.append(provider=package, path=f"file://{folder}")


def register() -> None:
    """Before Hydra starts; more than once does no harm."""
    Plugins.instance().register(InstalledConfigs)
