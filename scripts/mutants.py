"""Mutation check of the defining lines: each mutant must turn its test red (started by scripts/mutate.sh).

A mutant is one exact replacement in one file. The table holds one for each stabilizer, seam of the model and statistic,
at most 30; `mutation_sample.py` draws others at random. Exit code 0 if every mutant was noticed, 1 if one survived or
could not be tried.
"""

import sys
from typing import NamedTuple

from mutation import ROOT, Mutant, run


class Replacement(NamedTuple):
    file: str  # below stability_lab
    old: str  # occurs exactly once in the file
    new: str
    test: str  # file or node id below tests


REPLACEMENTS: tuple[Replacement, ...] = (
    # Stabilizers.
    Replacement(
        "stabilizers/zloss.py",
        "log_z_N.square()",
        "log_z_N.abs()",
        "stabilizers/test_zloss.py::test_published_examples",
    ),
    Replacement(
        "stabilizers/qknorm.py",
        "x = rms_norm(x, gain, self.eps, self.fused)",
        "x = x * 1",
        "stabilizers/test_qknorm.py::test_published_example",
    ),
    Replacement(
        "numerics.py",
        "    x = fp32(x)\n",
        "",
        "stabilizers/test_rmsnorm.py::test_low_precision_input_is_normalised_in_fp32_and_rounded_once",
    ),
    Replacement(
        "stabilizers/layernorm.py",
        "bias=self.bias",
        "bias=True",
        "stabilizers/test_layernorm.py::test_gain_and_bias_can_be_left_out",
    ),
    Replacement(
        "numerics.py",
        "torch.sigmoid(x * (2 / cap)).mul_(2 * cap).sub_(cap)",
        "torch.clamp(x, -cap, cap)",
        "stabilizers/test_final_softcap.py::test_published_values",
    ),
    Replacement(
        "stabilizers/final_softcap.py",
        "logit_transform=self",
        "score_mod=self",
        "stabilizers/test_final_softcap.py::test_the_two_caps_are_never_mixed_up",
    ),
    Replacement(
        "stabilizers/dynamic_scaling.py",
        "1 / (site.layer + 1)",
        "1 / max(site.layer, 1)",
        "stabilizers/test_dynamic_scaling.py::test_factors",
    ),
    Replacement(
        "stabilizers/attn_scale.py",
        '"inverse_d": 1 / root',
        '"inverse_d": 1 / shape.head_dim',
        "stabilizers/test_attn_scale.py::test_total_scale",
    ),
    Replacement(
        "seams.py",
        "residual=True, final=False",
        "residual=True, final=True",
        "stabilizers/test_postnorm.py::test_which_norms_exist",
    ),
    Replacement(
        "stabilizers/reordered_norm.py",
        "pre=False",
        "pre=True",
        "stabilizers/test_reordered_norm.py::test_the_size_of_a_branchs_weights_does_not_matter",
    ),
    Replacement(
        "stabilizers/perinorm.py", "branch=True", "branch=False", "stabilizers/test_perinorm.py::test_equals_gemma2"
    ),
    Replacement(
        "stabilizers/ln_scaling.py",
        "math.sqrt(site.layer + 1)",
        "(site.layer + 1)",
        "stabilizers/test_ln_scaling.py::test_factor",
    ),
    Replacement(
        "stabilizers/embed_scale.py",
        "math.sqrt(site.d_model) if",
        "site.d_model if",
        "stabilizers/test_embed_scale.py::test_tokens_are_scaled_and_positions_are_not",
    ),
    # Seams of the model.
    Replacement(
        "model/attention.py",
        "q, k = self.qk_transform(q, k)",
        "pass",
        "stabilizers/test_qknorm.py::test_it_is_applied_before_rope",
    ),
    Replacement(
        "model/attention.py",
        "logits = score_mod(logits)",
        "pass",
        "stabilizers/test_softcap.py::test_attention_with_it_is_the_textbook_formula",
    ),
    Replacement(
        "model/transformer.py",
        "self.logit_transform(logits), bound_L",
        "logits, bound_L",
        "stabilizers/test_final_softcap.py::test_loss_and_z_loss_see_the_capped_logits",
    ),
    Replacement(
        "model/block.py",
        "self.attn_residual_norm(x_BTD + self.attn_branch_norm(self.dropout(attended)))",
        "x_BTD + self.attn_residual_norm(self.attn_branch_norm(self.dropout(attended)))",
        "stabilizers/test_postnorm.py::test_equals_bert",
    ),
    Replacement(
        "model/block.py",
        "self.mlp(self.mlp_norm_scale(self.mlp_norm(x_BTD)))",
        "self.mlp_norm_scale(self.mlp(self.mlp_norm(x_BTD)))",
        "stabilizers/test_ln_scaling.py::test_it_acts_on_the_input_of_both_branches",
    ),
    Replacement(
        "objective/loss.py",
        "(grad_ce_N + grad_log_z_N)",
        "grad_ce_N",
        "stabilizers/test_zloss.py::test_value_and_gradient_equal_autograd",
    ),
    Replacement(
        "model/attention.py",
        "fp32((q_BHCK.half() * scale) @ k_BHSK.half().transpose(-1, -2)) * restore",
        "fp32((q_BHCK.half() * restore * scale) @ k_BHSK.half().transpose(-1, -2))",
        "stabilizers/test_dynamic_scaling.py::test_query_key_layer_keeps_fp16_from_overflowing",
    ),
    # The judge.
    Replacement(
        "judge/verdict.py",
        "() if evidence.own else events",
        "events",
        "judge/test_verdict.py::test_our_own_runs_have_one_source_of_data",
    ),
    Replacement(
        "judge/divergence.py",
        "min(begin + lowest + 1,",
        "min(begin + lowest,",
        "judge/test_verdict.py::test_the_first_bad_step_is_that_of_the_rise_and_not_of_the_lagging_median",
    ),
    Replacement(
        "judge/departures.py",
        "jump = y - centre",
        "jump = y - 0 * centre",
        "judge/test_events.py::test_a_spike_in_the_first_twenty_steps_and_while_the_loss_falls",
    ),
    Replacement(
        "judge/rates.py",
        "self.interval[0] > limit",
        "self.per_1000 > limit",
        "judge/test_verdict.py::test_short_spikes_are_a_matter_of_their_rate",
    ),
    Replacement(
        "judge/spikes.py",
        "distance >= rule.threshold * scale if",
        "distance > rule.threshold * scale if",
        "judge/test_spikes.py::test_olmo2_is_two_sided_at_least_and_sees_a_jump_out_of_a_flat_window",
    ),
    # Statistics of a comparison.
    Replacement("compare/statistics.py", "(tests - rank) * p", "tests * p", "compare/test_statistics.py"),
    Replacement("compare/contrasts.py", "<= SEEDS_MATTER", "> SEEDS_MATTER", "compare/test_contrasts.py"),
    Replacement(
        "compare/contrasts.py", "ratio = own * ratio + (1 - own) *", "ratio = ratio + 0 *", "compare/test_contrasts.py"
    ),
    # Pairs and steps.
    Replacement(
        "model/init.py",
        "{init_seed}\\0{name}",
        "{init_seed}",
        "model/test_init.py::test_generator_depends_on_seed_and_name",
    ),
    Replacement(
        "training/step.py",
        "self.stopped |= bad",
        "self.stopped = bad",
        "training/test_step.py::test_bad_gradient_changes_nothing_from_then_on",
    ),
)


def mutant_of(r: Replacement) -> Mutant:
    """SystemExit if the old text does not occur exactly once."""
    file = f"stability_lab/{r.file}"
    source = (ROOT / file).read_text(encoding="utf-8")
    if (count := source.count(r.old)) != 1:
        sys.exit(f"error: {file} holds {r.old!r} {count} times, not once")
    words = f"{' '.join(r.old.split())}  ->  {' '.join(r.new.split())}"
    return Mutant(file, source.replace(r.old, r.new), (f"tests/{r.test}",), words)


def main(words: list[str]) -> int:
    chosen = [r for r in REPLACEMENTS if not words or any(word in r.file or word in r.test for word in words)]
    if not chosen:
        sys.exit(f"error: no mutant matches {' '.join(words)}.")
    results = run([mutant_of(r) for r in chosen])
    killed = results.count("killed")
    print(f"{killed} of {len(results)} mutants killed")
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
