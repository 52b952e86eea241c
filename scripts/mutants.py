"""Mutation check: each mutant must turn its test red (started by scripts/mutate.sh).

A mutant is one exact replacement in one file of a temporary copy of the checkout. The copy is first tested as
it is, because a test that is red anyway notices nothing. Exit code 0 if every mutant was noticed, 1 if one
survived or could not be tried.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 600
NOT_COPIED = (".git", "outputs", "__pycache__", ".pytest_cache", ".ruff_cache", ".cache", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str  # stands exactly once in the file
    new: str
    test: str  # pytest target: file or node id


ZLOSS, QKNORM = "stability_lab/stabilizers/zloss.py", "stability_lab/stabilizers/qknorm.py"
RMSNORM, LAYERNORM = "stability_lab/stabilizers/rmsnorm.py", "stability_lab/stabilizers/layernorm.py"
NUMERICS, LOSS = "stability_lab/numerics.py", "stability_lab/objective/loss.py"
SOFTCAP, DYNAMIC_SCALING = "stability_lab/stabilizers/softcap.py", "stability_lab/stabilizers/dynamic_scaling.py"
ATTN_SCALE, LN_SCALING = "stability_lab/stabilizers/attn_scale.py", "stability_lab/stabilizers/ln_scaling.py"
POSTNORM, PERINORM = "stability_lab/stabilizers/postnorm.py", "stability_lab/stabilizers/perinorm.py"
REORDERED_NORM, EMBED_SCALE = "stability_lab/stabilizers/reordered_norm.py", "stability_lab/stabilizers/embed_scale.py"
FINAL_SOFTCAP, SEAMS = "stability_lab/stabilizers/final_softcap.py", "stability_lab/seams.py"
BLOCK, GPT, PROBE = (
    "stability_lab/model/block.py",
    "stability_lab/model/transformer.py",
    "stability_lab/diagnostics/probe.py",
)
ATTENTION, INIT = "stability_lab/model/attention.py", "stability_lab/model/init.py"
FORMATS, SHARDS, SCAN = (
    "stability_lab/data/tokens/formats.py",
    "stability_lab/data/tokens/shards.py",
    "stability_lab/data/tokens/scan.py",
)
REPEATS, LOADER, STREAM = (
    "stability_lab/data/repeats.py",
    "stability_lab/data/loader.py",
    "stability_lab/data/stream.py",
)
PREPARE, SYNTHETIC, HUB = (
    "stability_lab/data/tokens/prepare.py",
    "stability_lab/data/sources/synthetic.py",
    "stability_lab/data/sources/hub.py",
)
NETWORK, PREPARED = "stability_lab/data/network.py", "stability_lab/data/tokens/prepared.py"
DOCUMENTS, HF_TOKENIZER = "stability_lab/model/documents.py", "stability_lab/data/hf_tokenizer.py"
LOOP, TEXT = "stability_lab/training/loop.py", "stability_lab/data/sources/text_files.py"
STEP, OPTIMIZER = "stability_lab/training/step.py", "stability_lab/training/optimizers.py"
CHECKPOINT, LOOP = "stability_lab/training/checkpoint.py", "stability_lab/training/loop.py"
RESUME, LOCK, SIGNALS = "stability_lab/run/resume.py", "stability_lab/disk/lock.py", "stability_lab/run/signals.py"
JSONL = "stability_lab/tracking/run_files.py"

TEST_ZLOSS, TEST_QKNORM = "tests/stabilizers/test_zloss.py", "tests/stabilizers/test_qknorm.py"
TEST_RMSNORM, TEST_LAYERNORM = "tests/stabilizers/test_rmsnorm.py", "tests/stabilizers/test_layernorm.py"
TEST_SOFTCAP, TEST_FINAL_SOFTCAP = "tests/stabilizers/test_softcap.py", "tests/stabilizers/test_final_softcap.py"
TEST_DYNAMIC_SCALING = "tests/stabilizers/test_dynamic_scaling.py"
TEST_ATTN_SCALE, TEST_LN_SCALING = "tests/stabilizers/test_attn_scale.py", "tests/stabilizers/test_ln_scaling.py"
TEST_POSTNORM, TEST_PERINORM = "tests/stabilizers/test_postnorm.py", "tests/stabilizers/test_perinorm.py"
TEST_REORDERED_NORM = "tests/stabilizers/test_reordered_norm.py"
TEST_EMBED_SCALE, TEST_PADDED_VOCAB = "tests/stabilizers/test_embed_scale.py", "tests/model/test_padded_vocab.py"
TEST_BACKENDS, TEST_PROBE = "tests/model/test_backends.py", "tests/diagnostics/test_probe.py"
TEST_ATTENTION, TEST_INIT = "tests/model/test_attention.py", "tests/model/test_init.py"
TEST_FORMATS, TEST_SHARDS, TEST_TOKENS = (f"tests/data/test_{name}.py" for name in ("formats", "shards", "tokens"))
TEST_REPEATS, TEST_LOADER, TEST_HUB = (f"tests/data/test_{name}.py" for name in ("repeats", "loader", "hub"))
TEST_PREPARE, TEST_SYNTHETIC = "tests/data/tokens/test_prepare.py", "tests/data/sources/test_synthetic.py"
TEST_DOCUMENTS, TEST_MASKS = "tests/model/test_documents.py", "tests/training/test_masks.py"
TEST_HF_TOKENIZER, TEST_TEXT = "tests/data/test_hf_tokenizer.py", "tests/data/sources/test_text_files.py"
TEST_STEP, TEST_OPTIMIZER = "tests/training/test_step.py", "tests/training/test_optimizers.py"
COMPARISON, STATISTICS = "stability_lab/compare/comparison.py", "stability_lab/compare/statistics.py"
COMPARABILITY, GROUPING = "stability_lab/compare/comparability.py", "stability_lab/compare/grouping.py"
LADDERS, FACTORIAL = "stability_lab/compare/ladders.py", "stability_lab/compare/factorial.py"
TEST_COMPARE, TEST_STATISTICS = "tests/compare/test_comparison.py", "tests/compare/test_statistics.py"
TEST_GROUPING, TEST_LADDERS = "tests/compare/test_grouping.py", "tests/compare/test_ladders.py"
TEST_FACTORIAL = "tests/compare/test_factorial.py"
WANDB, WANDB_FILES = "stability_lab/tracking/wandb/wandb_tracker.py", "stability_lab/tracking/wandb/end_files.py"
WANDB_SYNC, WANDB_API = "stability_lab/tracking/wandb/offline.py", "stability_lab/tracking/wandb/api.py"
WANDB_REBUILD, WANDB_WORKSPACE = "stability_lab/tracking/wandb/rebuild.py", "stability_lab/tracking/wandb/workspace.py"
TEST_WANDB, TEST_WANDB_FILES = "tests/tracking/wandb/test_wandb_tracker.py", "tests/tracking/wandb/test_end_files.py"
TEST_WANDB_SYNC, TEST_WANDB_API = "tests/tracking/wandb/test_offline.py", "tests/tracking/wandb/test_api.py"
TEST_WANDB_REBUILD = "tests/tracking/wandb/test_rebuild.py"
TEST_WANDB_WORKSPACE = "tests/tracking/wandb/test_workspace.py"

FIGURES, TEST_FIGURES = "stability_lab/compare/figures", "tests/compare/test_figures.py"
JUDGE_LOG, VERDICT, EVENTS = (f"stability_lab/judge/{name}.py" for name in ("log", "verdict", "events"))
TEST_VERDICT, TEST_LOGS = "tests/judge/test_verdict.py", "tests/logs/test_training_log.py"
TEST_CHECKPOINT, TEST_LOOP_STATE = "tests/training/test_checkpoint.py", "tests/training/test_loop_state.py"
TEST_RESUME, TEST_LOCK, TEST_SIGNALS = (
    "tests/run/test_resume.py",
    "tests/disk/test_lock.py",
    "tests/run/test_signals.py",
)
TEST_JSONL = "tests/tracking/test_run_files.py"
SWEEP, TEST_SWEEP = "stability_lab/run/sweep.py", "tests/run/test_sweep.py"

VERDICTS, CLAIMS = "stability_lab/reproduction/claim_verdicts.py", "stability_lab/reproduction/claims.py"
EVIDENCE, NUMBERS = "stability_lab/reproduction/evidence.py", "stability_lab/reproduction/numbers.py"
GROWTH, REPRODUCTION_JOBS = "stability_lab/reproduction/growth.py", "stability_lab/reproduction/jobs.py"
DATAFILE, COLLECT = "stability_lab/reproduction/datafile.py", "stability_lab/reproduction/collect.py"
REPRODUCE, TEST_REPRODUCE = "stability_lab/commands/reproduce.py", "tests/reproduction/test_reproduce.py"
TEST_DATAFILE = "tests/reproduction/test_datafile.py"
TEST_VERDICTS, TEST_CLAIMS = "tests/reproduction/test_claim_verdicts.py", "tests/reproduction/test_claims.py"
TEST_EVIDENCE, TEST_NUMBERS = "tests/reproduction/test_evidence.py", "tests/reproduction/test_numbers.py"
TEST_GROWTH, TEST_CATALOGUE = "tests/reproduction/test_growth.py", "tests/reproduction/test_catalogue.py"

MUTANTS: tuple[Mutant, ...] = (
    # Reproductions: the sign, the margin, the sample sizes and pairs behind a verdict.
    Mutant(
        VERDICTS,
        "return SAME_RESOLVED if same else CONTRADICTS",
        "return SAME_RESOLVED",
        f"{TEST_VERDICTS}::test_swapping_the_arms_turns_the_verdict_round",
    ),
    Mutant(
        VERDICTS,
        "needed is None or needed > d.n",
        "needed is None",
        f"{TEST_VERDICTS}::test_what_cannot_show_the_published_difference_says_nothing_of_its_sign",
    ),
    Mutant(
        VERDICTS,
        "if found.low > margin or found.high < -margin:",
        "if found.low > margin:",
        f"{TEST_VERDICTS}::test_equality_is_shown_or_refuted_or_neither_and_knows_no_order",
    ),
    Mutant(
        VERDICTS,
        "seeds(effect, d.spread or 0.0, tests=d.tests)",
        "seeds(effect, d.spread or 0.0)",
        f"{TEST_VERDICTS}::test_what_cannot_show_the_published_difference_says_nothing_of_its_sign",
    ),
    Mutant(
        VERDICTS,
        "min(steps_a, steps_b) < needed",
        "max(steps_a, steps_b) < needed",
        f"{TEST_VERDICTS}::test_too_few_scored_steps_for_the_published_rates",
    ),
    Mutant(
        VERDICTS,
        "p = max(d.p, ",
        "p = min(d.p, ",
        f"{TEST_VERDICTS}::test_runs_with_one_spike_each_are_no_proof",
    ),
    Mutant(
        VERDICTS, "elif most > 0:", "elif most > 1:", f"{TEST_VERDICTS}::test_one_unstable_run_of_three_orders_no_arms"
    ),
    Mutant(
        VERDICTS,
        "above, below = low >= 1, high <= 1",
        "above, below = low >= 1, high < 1",
        f"{TEST_VERDICTS}::test_brackets_that_do_not_touch_resolve_an_order",
    ),
    Mutant(
        VERDICTS,
        "error = half / float(stats.norm.ppf((1 + LEVEL) / 2)) * math.sqrt(2)",
        "error = half / float(stats.norm.ppf((1 + LEVEL) / 2))",
        f"{TEST_VERDICTS}::test_printed_values_are_tested_with_their_own_uncertainty",
    ),
    Mutant(
        STATISTICS,
        "(margin - abs(d.value)) / (d.spread",
        "(margin - d.value) / (d.spread",
        f"{TEST_VERDICTS}::test_equivalence_is_that_of_statsmodels",
    ),
    Mutant(
        STATISTICS,
        "return max(0.0, 2 * _beyond(",
        "return max(0.0, 1 + 0 * _beyond(",
        f"{TEST_VERDICTS}::test_the_pairs_that_equality_would_take_have_the_power_they_promise",
    ),
    Mutant(
        CLAIMS,
        "return difference_by_seed(own, other, _paired(a, b))",
        "return difference_by_seed(own, other, True)",
        f"{TEST_CLAIMS}::test_pairs_are_seeds_that_saw_the_same_batches",
    ),
    Mutant(
        CLAIMS,
        'lr = lrs[test.get("at", 0)] if lrs else None',
        "lr = lrs[0] if lrs else None",
        f"{TEST_CLAIMS}::test_the_learning_rate_is_named_by_its_place",
    ),
    Mutant(
        CLAIMS,
        "alike = [both[seed] + none[seed] for seed in seeds]",
        "alike = [2 * both[seed] for seed in seeds]",
        f"{TEST_CLAIMS}::test_an_interaction_is_the_change_of_an_effect",
    ),
    Mutant(
        CLAIMS,
        "lrs = scale.lrs if scale else ()",
        "lrs = sorted({run.lr for run in evidence.runs if run.lr is not None})",
        f"{TEST_CLAIMS}::test_the_learning_rate_is_named_by_its_place",
    ),
    Mutant(
        CLAIMS,
        "        sum(planned),\n",
        "        0,\n",
        f"{TEST_CLAIMS}::test_what_is_missing_is_said_and_makes_nothing_clearer",
    ),
    Mutant(
        EVIDENCE,
        "value = None if self.record.diverged else self.record.metric(name)",
        "value = self.record.metric(name)",
        f"{TEST_CLAIMS}::test_a_diverged_run_is_in_no_mean",
    ),
    Mutant(
        EVIDENCE,
        'summary["status"] = "diverged" if verdict == "diverged" else "completed"',
        'summary["status"] = summary["status"]',
        f"{TEST_DATAFILE}::test_d_decides_what_diverged",
    ),
    Mutant(
        EVIDENCE,
        "logs[row] - np.median",
        "logs[row - 1] - np.median",
        f"{TEST_EVIDENCE}::test_what_is_derived_from_the_series",
    ),
    Mutant(
        NUMBERS,
        'yield "raw_logit_scaled", raw / root',
        'yield "raw_logit_scaled", raw',
        f"{TEST_NUMBERS}::test_a_number_is_that_of_its_formula",
    ),
    Mutant(
        GROWTH,
        "math.log(_size(first.grad) / _size(last.grad)) / depth",
        "math.log(_size(last.grad) / _size(first.grad)) / depth",
        f"{TEST_GROWTH}::test_exponents_are_those_of_a_model_run_by_hand",
    ),
    Mutant(
        DATAFILE,
        "        if key not in planned:",
        "        if False:",
        f"{TEST_DATAFILE}::test_what_was_changed_is_refused",
    ),
    Mutant(
        REPRODUCTION_JOBS,
        "    if fingerprint(run.config, __version__) != digest:",
        "    if False:",
        f"{TEST_REPRODUCE}::test_a_damaged_run_is_named_and_never_costs_what_was_known",
    ),
    Mutant(DATAFILE, "    if own != asked:", "    if False:", f"{TEST_DATAFILE}::test_what_was_changed_is_refused"),
    Mutant(DATAFILE, "ConfigDict(strict=True)", "ConfigDict()", f"{TEST_DATAFILE}::test_what_was_changed_is_refused"),
    Mutant(
        EVIDENCE,
        "    if there < made:",
        "    if there < 0:",
        f"{TEST_EVIDENCE}::test_a_run_whose_files_are_not_whole_is_told",
    ),
    Mutant(
        COLLECT,
        "    gone = len(known - {_key(run) for run in runs})",
        "    gone = 0",
        f"{TEST_REPRODUCE}::test_a_damaged_run_is_named_and_never_costs_what_was_known",
    ),
    Mutant(
        REPRODUCE,
        "    if not found:",
        "    if False:",
        f"{TEST_REPRODUCE}::test_a_page_is_never_replaced_by_one_with_less",
    ),
    Mutant(
        REPRODUCTION_JOBS,
        'plain["optimizer"] = {**plain["optimizer"], "lr": lr}',
        'plain["optimizer"] = {**plain["optimizer"], "lr": 2 * lr}',
        f"{TEST_CATALOGUE}::test_rates_and_seeds_are_set_as_composing_sets_them",
    ),
    Mutant(
        OPTIMIZER,
        "matrices | embeddings if decay_embeddings",
        "matrices if decay_embeddings",
        f"{TEST_OPTIMIZER}::test_embeddings_decay_where_asked_for",
    ),
    Mutant(
        PROBE,
        "(q_gain.abs().amax() * k_gain.abs().amax())",
        "(q_gain.abs().amax() + k_gain.abs().amax())",
        f"{TEST_PROBE}::test_the_largest_product_of_gains_is_over_layers",
    ),
    # z-loss: its square, its weight, its mask, its place in the objective and its absence from the reported loss.
    Mutant(ZLOSS, "log_z_N.square()", "log_z_N.abs()", f"{TEST_ZLOSS}::test_published_examples"),
    Mutant(ZLOSS, "self.weight * log_z_N", "2 * self.weight * log_z_N", f"{TEST_ZLOSS}::test_published_examples"),
    Mutant(
        LOSS,
        "torch.where(valid_N, term(log_z_N), 0.0).sum()",
        "term(log_z_N).sum()",
        f"{TEST_ZLOSS}::test_reference_rows",
    ),
    Mutant(LOSS, "(ce + penalty) * inv_n", "ce * inv_n", f"{TEST_ZLOSS}::test_value_and_gradient_equal_autograd"),
    Mutant(LOSS, "(grad_ce_N + grad_log_z_N)", "grad_ce_N", f"{TEST_ZLOSS}::test_value_and_gradient_equal_autograd"),
    Mutant(
        LOSS,
        "ce=ce.detach()",
        "ce=(ce + penalty).detach()",
        f"{TEST_ZLOSS}::test_reported_loss_never_contains_the_penalty",
    ),
    # QK-norm: each norm, the scope and the order of norm and rotation.
    Mutant(QKNORM, "x = rms_norm(x, gain, self.eps)", "x = x * 1", f"{TEST_QKNORM}::test_published_example"),
    Mutant(
        QKNORM,
        "x = F.layer_norm(x, x.shape[-1:], gain, None, self.eps)",
        "x = x * 1",
        f"{TEST_QKNORM}::test_published_example",
    ),
    Mutant(
        QKNORM,
        "+ self.eps) * math.sqrt(x.shape[-1])",
        "+ self.eps)",
        f"{TEST_QKNORM}::test_l2_with_temperature_starts_as_rms",
    ),
    Mutant(
        QKNORM,
        'x_BTHK if self.scope == "head" else x_BTHK.flatten(-2)',
        "x_BTHK",
        f"{TEST_QKNORM}::test_scope_full_lets_one_head_take_all_the_norm",
    ),
    Mutant(
        ATTENTION,
        "q, k = self.qk_transform(q, k)",
        "q, k = (q, k) if rope is None else (rotate(q, *rope), rotate(k, *rope))\n"
        "        q, k, rope = *self.qk_transform(q, k), None",
        f"{TEST_QKNORM}::test_it_is_applied_before_rope",
    ),
    # RMSNorm: fp32 inside, eps, gain, the input's dtype outside.
    Mutant(
        NUMERICS,
        "    x = fp32(x)\n",
        "",
        f"{TEST_RMSNORM}::test_low_precision_input_is_normalised_in_fp32_and_rounded_once",
    ),
    Mutant(NUMERICS, "mean_square.add_(eps)", "mean_square", f"{TEST_RMSNORM}::test_eps_stands_under_the_root"),
    Mutant(NUMERICS, "else normal * gain", "else normal", f"{TEST_RMSNORM}::test_equals_torch_and_olmo2"),
    Mutant(
        NUMERICS,
        "addcmul(grad_y, y, mean, value=-1)",
        "mul(grad_y, 1)",
        f"{TEST_RMSNORM}::test_gradient_is_that_of_the_formula",
    ),
    Mutant(
        RMSNORM,
        "self.eps).to(x.dtype)",
        "self.eps)",
        f"{TEST_RMSNORM}::test_low_precision_input_is_normalised_in_fp32_and_rounded_once",
    ),
    # LayerNorm: its options reach the module.
    Mutant(LAYERNORM, "bias=self.bias", "bias=True", f"{TEST_LAYERNORM}::test_gain_and_bias_can_be_left_out"),
    Mutant(LAYERNORM, "eps=self.eps, el", "eps=1e-5, el", f"{TEST_LAYERNORM}::test_reference_rows"),
    # Soft-caps: the curve, its slope, the place before the mask and after the measurement, and before log Z.
    Mutant(
        NUMERICS,
        "cap * torch.tanh(fp32(x) / cap)",
        "cap * torch.tanh(x / cap)",
        f"{TEST_SOFTCAP}::test_low_precision_is_capped_in_fp32",
    ),
    Mutant(
        NUMERICS,
        "cap * torch.tanh(fp32(x) / cap)",
        "torch.clamp(fp32(x), -cap, cap)",
        f"{TEST_FINAL_SOFTCAP}::test_published_values",
    ),
    Mutant(SOFTCAP, "/ self.cap).square()", "/ self.cap)", f"{TEST_SOFTCAP}::test_published_values"),
    Mutant(
        SOFTCAP,
        "size > 2 * self.cap",
        "size > self.cap",
        f"{TEST_SOFTCAP}::test_shares_are_those_of_a_naive_computation",
    ),
    Mutant(
        ATTENTION,
        "            logits = score_mod(logits)  # before the mask: a capped -inf would let the future in\n"
        "        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)",
        "            logits = score_mod(logits.masked_fill(hidden, -math.inf))\n"
        "            hidden = torch.zeros_like(hidden)\n"
        "        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)",
        f"{TEST_SOFTCAP}::test_the_future_stays_invisible_where_every_logit_is_very_negative",
    ),
    Mutant(
        ATTENTION,
        "largest = torch.maximum(largest, logits.masked_fill(",
        "largest = torch.maximum(largest, (score_mod or torch.nn.Identity())(logits).masked_fill(",
        f"{TEST_SOFTCAP}::test_three_token_example",
    ),
    Mutant(ATTENTION, "region & visible", "region", f"{TEST_SOFTCAP}::test_shares_are_those_of_a_naive_computation"),
    Mutant(
        GPT,
        "self.logit_transform(logits), torch",
        "logits, torch",
        f"{TEST_FINAL_SOFTCAP}::test_loss_and_z_loss_see_the_capped_logits",
    ),
    Mutant(
        FINAL_SOFTCAP,
        "logit_transform=Final",
        "score_mod=Final",
        f"{TEST_FINAL_SOFTCAP}::test_the_two_caps_are_never_mixed_up",
    ),
    # Factors of the attention logits.
    Mutant(
        DYNAMIC_SCALING, "1 / (shape.layer + 1)", "1 / max(shape.layer, 1)", f"{TEST_DYNAMIC_SCALING}::test_factors"
    ),
    Mutant(DYNAMIC_SCALING, "max(shape.n_layers - 1, 1)", "shape.n_layers", f"{TEST_DYNAMIC_SCALING}::test_factors"),
    Mutant(DYNAMIC_SCALING, "self.theta.exp()", "1 + self.theta", f"{TEST_DYNAMIC_SCALING}::test_learned_factors"),
    Mutant(
        DYNAMIC_SCALING,
        "score_restore=lambda shape: shape.layer + 1.0",
        "score_restore=lambda shape: 1.0",
        f"{TEST_DYNAMIC_SCALING}::test_query_key_layer_trains_as_the_baseline_does",
    ),
    Mutant(
        ATTENTION,
        "fp32((q_BHCK.half() * scale) @ k_BHSK.half().transpose(-1, -2)) * restore",
        "fp32((q_BHCK.half() * restore * scale) @ k_BHSK.half().transpose(-1, -2))",
        f"{TEST_DYNAMIC_SCALING}::test_query_key_layer_keeps_fp16_from_overflowing",
    ),
    Mutant(
        ATTN_SCALE, '"inverse_d": 1 / root', '"inverse_d": 1 / shape.head_dim', f"{TEST_ATTN_SCALE}::test_total_scale"
    ),
    # Placements and what scales the stream and the branches.
    Mutant(POSTNORM, "final=False", "final=True", f"{TEST_POSTNORM}::test_which_norms_exist"),
    Mutant(
        BLOCK,
        "self.attn_residual_norm(x_BTD + self.attn_branch_norm(self.dropout(attended)))",
        "x_BTD + self.attn_residual_norm(self.attn_branch_norm(self.dropout(attended)))",
        f"{TEST_POSTNORM}::test_equals_bert",
    ),
    Mutant(
        REORDERED_NORM,
        "pre=False",
        "pre=True",
        f"{TEST_REORDERED_NORM}::test_the_size_of_a_branchs_weights_does_not_matter",
    ),
    Mutant(PERINORM, "branch=True", "branch=False", f"{TEST_PERINORM}::test_equals_gemma2"),
    Mutant(LN_SCALING, "math.sqrt(layer + 1)", "(layer + 1)", f"{TEST_LN_SCALING}::test_factor"),
    Mutant(
        BLOCK,
        "self.mlp(self.norm_scale(self.mlp_norm(x_BTD)))",
        "self.norm_scale(self.mlp(self.mlp_norm(x_BTD)))",
        f"{TEST_LN_SCALING}::test_it_acts_on_the_input_of_both_branches",
    ),
    Mutant(
        SEAMS,
        "and not self.norm_placement.pre",
        "and self.norm_placement.pre and False",
        f"{TEST_LN_SCALING}::test_it_is_refused_without_a_pre_norm",
    ),
    Mutant(
        GPT,
        "        x = self.embed_scale(self.embed(tokens_BT))",
        "        x = self.embed(tokens_BT)",
        f"{TEST_EMBED_SCALE}::test_tokens_are_scaled_and_positions_are_not",
    ),
    Mutant(
        EMBED_SCALE,
        "math.sqrt(d_model) if",
        "d_model if",
        f"{TEST_EMBED_SCALE}::test_tokens_are_scaled_and_positions_are_not",
    ),
    # Padding, back-ends and what the probe hides.
    Mutant(
        GPT,
        "if logits.shape[-1] != self.config.vocab_size:",
        "if False:",
        f"{TEST_PADDED_VOCAB}::test_logits_loss_and_gradients_are_the_same",
    ),
    Mutant(
        INIT,
        "weight = weight[: model.config.vocab_size]",
        "pass",
        f"{TEST_PADDED_VOCAB}::test_initial_values_of_the_real_rows_are_the_same",
    ),
    Mutant(ATTENTION, 'if requested == "sdpa" and for_logits:', "if False:", f"{TEST_BACKENDS}::test_refusals"),
    Mutant(
        PROBE,
        "math.nan if any(math.isnan(v) for v in values) else max(values)",
        "max(values)",
        f"{TEST_PROBE}::test_a_nan_is_not_hidden",
    ),
    # The core.
    Mutant(
        ATTENTION,
        "device=logits.device) > query[:, None]",
        "device=logits.device) > query[:, None] + 1",
        f"{TEST_ATTENTION}::test_causality_by_gradient",
    ),
    Mutant(INIT, "{init_seed}\\0{name}", "{init_seed}", f"{TEST_INIT}::test_generator_depends_on_seed_and_name"),
    Mutant(
        STEP, "sums[4], norm, coef", "sums[4], norm * coef, coef", f"{TEST_STEP}::test_norm_is_measured_before_clipping"
    ),
    Mutant(
        STEP,
        "self.stopped |= bad",
        "self.stopped = bad",
        f"{TEST_STEP}::test_bad_gradient_changes_nothing_from_then_on",
    ),
    Mutant(
        STEP,
        "(targets != IGNORE).sum().float()",
        "(targets != IGNORE).sum() / self.grad_accum_steps",
        f"{TEST_STEP}::test_accumulation_does_not_change_the_step",
    ),
    Mutant(
        OPTIMIZER,
        "= grad_divisor, call_off",
        "= grad_divisor, None",
        f"{TEST_OPTIMIZER}::test_called_off_update_changes_nothing",
    ),
    Mutant(
        OPTIMIZER,
        "independent_weight_decay / config.lr",
        "independent_weight_decay",
        f"{TEST_OPTIMIZER}::test_decay_of_one_step_without_gradient",
    ),
    # compare: pairs by seed, intervals, corrections, what is left out of a mean, and what takes pairs away.
    Mutant(
        STATISTICS,
        "own[seed] for seed in common], [other[seed]",
        "own[seed] for seed in own], [other[seed]",
        TEST_COMPARE,
    ),
    Mutant(COMPARISON, "_values(cell.finite, metric)\n    mean", "_values(cell.ended, metric)\n    mean", TEST_COMPARE),
    Mutant(COMPARISON, "value > best + DEGRADED_NATS", "value > best", TEST_COMPARE),
    Mutant(STATISTICS, "(tests - rank) * p", "tests * p", TEST_STATISTICS),
    Mutant(
        STATISTICS,
        "(0.0 if math.isnan(other_side) else other_side)",
        "other_side",
        f"{TEST_STATISTICS}::test_power_is_that_of_an_integration_also_for_large_effects",
    ),
    Mutant(STATISTICS, "float(d.std(ddof=1)) if len(d) > 1", "float(d.std()) if len(d) > 1", TEST_STATISTICS),
    Mutant(STATISTICS, "_critical(n - 1)", "_critical(n)", TEST_STATISTICS),
    Mutant(STATISTICS, "math.sqrt(n / 2)", "math.sqrt(n)", TEST_STATISTICS),
    Mutant(
        COMPARABILITY, "found in values.items() if len(found) > 1)", "found in values.items() if False)", TEST_COMPARE
    ),
    Mutant(COMPARABILITY, 'check.same is None and check.name != "last batch"', "False", TEST_COMPARE),
    Mutant(GROUPING, "all(len(values) == 1 for values in within.values())", "False", TEST_GROUPING),
    Mutant(GROUPING, "(run.ended, str(run.manifest.get", "(str(run.manifest.get", TEST_GROUPING),
    Mutant(
        LADDERS, "math.nan if value is None and run.diverged", "None if value is None and run.diverged", TEST_LADDERS
    ),
    Mutant(LADDERS, 'low and run.verdict == "no_learning"', 'run.verdict == "no_learning"', TEST_LADDERS),
    Mutant(FACTORIAL, "1.0 if f in on else -1.0", "1.0 if f in on else 0.0", TEST_FACTORIAL),
    # W&B: what a run records, the order and the marks of uploads, and what is taken from the server.
    Mutant(
        WANDB,
        'resume="allow" if run_info.resume_id else None',
        "resume=None",
        f"{TEST_WANDB}::test_resumed_run_keeps_its_id_and_syncs_in_order",
    ),
    Mutant(
        WANDB_FILES,
        "clean = redact(content)",
        "clean = content",
        f"{TEST_WANDB_FILES}::test_credentials_stay_at_home",
    ),
    Mutant(
        WANDB_SYNC,
        "if done.returncode or not segment.uploaded:",
        "if done.returncode:",
        f"{TEST_WANDB_SYNC}::test_an_upload_without_a_mark_has_failed",
    ),
    Mutant(
        WANDB_SYNC,
        "return sorted(found.values())",
        "return list(reversed(sorted(found.values())))",
        f"{TEST_WANDB_SYNC}::test_oldest_first_with_the_parts_of_a_run_in_order",
    ),
    Mutant(
        WANDB_SYNC,
        "later is not None and later > segment",
        "False",
        f"{TEST_WANDB_SYNC}::test_an_early_part_never_replaces_a_later_one",
    ),
    Mutant(
        WANDB_SYNC,
        "waiting.add(segment.run_id)",
        "pass",
        f"{TEST_WANDB_SYNC}::test_a_running_run_waits_and_so_do_its_later_parts",
    ),
    Mutant(
        WANDB_API,
        'if file.name != f"{FOLDER}/{name}" or name not in _WANTED:',
        "if False:",
        f"{TEST_WANDB_API}::test_hostile_names_stay_inside",
    ),
    Mutant(
        WANDB_API,
        "if written > limit:",
        "if False:",
        f"{TEST_WANDB_API}::test_sizes_are_bounded",
    ),
    Mutant(
        WANDB_API,
        'if state["state"] != "running" and _read_json',
        "if _read_json",
        f"{TEST_WANDB_API}::test_a_running_run_is_read_anew_and_from_its_history",
    ),
    Mutant(
        WANDB_REBUILD,
        "return _WORDS.get(value, value) if isinstance(value, str) else value",
        "return value",
        f"{TEST_WANDB_REBUILD}::test_our_own_history_comes_back_as_it_was",
    ),
    Mutant(
        WANDB_WORKSPACE,
        'line("optim/grad_norm", log_y=True)',
        'line("optim/grad_norm")',
        f"{TEST_WANDB_WORKSPACE}::test_the_description_says_which_runs_and_panels",
    ),
    # Figures: what one huge value may not do, which runs are drawn, where marks stand, and what is never overwritten.
    Mutant(
        f"{FIGURES}/style.py",
        "if low - below <= s <= high + above",
        "if low - below <= s",
        f"{TEST_FIGURES}::test_one_huge_loss_does_not_flatten_the_rest",
    ),
    Mutant(
        f"{FIGURES}/style.py",
        "    replace_file(path, picture.getvalue())",
        '    path.open("wb").close()\n    path.write_bytes(picture.getvalue())',
        f"{TEST_FIGURES}::test_a_folder_that_cannot_be_made_or_written_is_one_sentence",
    ),
    Mutant(
        f"{FIGURES}/chosen.py",
        "len(runs), _spread(rows), _height(setting)",
        "_height(setting), _spread(rows), len(runs)",
        f"{TEST_FIGURES}::test_curves_are_of_the_highest_learning_rate_that_every_arm_has",
    ),
    Mutant(
        f"{FIGURES}/chosen.py",
        "_spread(rows), _height",
        "0.0, _height",
        f"{TEST_FIGURES}::test_curves_are_of_the_learning_rate_at_which_arms_differ_most",
    ),
    Mutant(
        f"{FIGURES}/chosen.py",
        "key=lambda value: seeds[value]",
        "key=lambda value: -seeds[value]",
        f"{TEST_FIGURES}::test_curves_are_of_the_highest_learning_rate_that_every_arm_has",
    ),
    Mutant(
        f"{FIGURES}/curves.py",
        "inside[np.argmax(heights)]",
        "inside[0]",
        f"{TEST_FIGURES}::test_spikes_stand_at_their_events_steps_on_their_own_panel",
    ),
    Mutant(
        f"{FIGURES}/curves.py",
        "last = known[-1:]",
        "last = np.array([len(values) - 1])",
        f"{TEST_FIGURES}::test_a_run_that_ended_early_ends_with_a_cross_at_its_last_finite_value",
    ),
    Mutant(
        f"{FIGURES}/learning_rate.py",
        "filled=not row.degraded",
        "filled=True",
        f"{TEST_FIGURES}::test_degraded_means_are_open",
    ),
    Mutant(
        f"{FIGURES}/differences.py",
        "row.difference, bool(row.difference.significant), ",
        "row.difference, row.difference.significant is not None, ",
        f"{TEST_FIGURES}::test_significant_differences_are_filled_and_all_have_their_interval",
    ),
    # The judge: a step without a value is no NaN, where a divergence began, and where a signal was back.
    Mutant(
        JUDGE_LOG,
        "self.has(name) & ~np.isfinite(self.signals[name])",
        "~np.isfinite(self.signals[name])",
        f"{TEST_VERDICT}::test_steps_without_a_value_are_no_nan",
    ),
    Mutant(
        VERDICT,
        "min(begin + lowest + 1,",
        "min(begin + lowest,",
        f"{TEST_VERDICT}::test_the_first_bad_step_is_that_of_the_rise_and_not_of_the_lagging_mean",
    ),
    Mutant(VERDICT, "after + 2 * width", "after + width", f"{TEST_VERDICT}::test_the_first_bad_step_in_noise"),
    Mutant(
        EVENTS,
        "return begin + int(where[0])",
        "return begin",
        "tests/judge/test_events.py::test_recovery_is_within_half_the_height_that_counts",
    ),
    Mutant(
        "stability_lab/judge/lr_sensitivity.py",
        "lowest + nats + _ROUNDING",
        "lowest + nats",
        "tests/judge/test_lr_sensitivity.py::test_published_decimals_at_the_limits",
    ),
    Mutant(
        "stability_lab/judge/series.py",
        'self._no_norm.append(row.get("optim/grad_norm") is None)',
        "self._no_norm.append(False)",
        "tests/monitoring/test_monitor.py::test_steps_without_a_gradient_norm_are_judged_alike_online_and_offline",
    ),
    # Sweeps: who may still start, and what the end says of the jobs.
    Mutant(
        SWEEP,
        'if self.fail_fast and record.get("status") == "failed":',
        'if record.get("status") == "failed":',
        f"{TEST_SWEEP}::test_a_stop_keeps_further_jobs_from_starting",
    ),
    Mutant(
        SWEEP,
        'if isinstance(record, dict) and record.get("launch") == self.launch:',
        "if isinstance(record, dict):",
        f"{TEST_SWEEP}::test_half_a_line_and_an_earlier_start_of_the_sweep_do_not_count",
    ),
    Mutant(
        SWEEP,
        'if not code and strict and counts["diverged"]:',
        'if not code and counts["diverged"]:',
        f"{TEST_SWEEP}::test_a_diverged_run_is_a_result_and_a_failed_one_an_error",
    ),
    # What score reads: gaps stay gaps, epochs are numbered through, an empty column is passed over.
    Mutant(
        "stability_lab/logs/training_log.py",
        'fields[f"no_{role}"] = ~has',
        'fields[f"no_{role}"] = None',
        "tests/commands/test_score.py::test_signals_that_are_logged_at_different_steps",
    ),
    Mutant(
        "stability_lab/logs/steps.py",
        "steps + segment * epoch",
        "steps + segment",
        f"{TEST_LOGS}::test_steps_that_begin_anew_each_epoch_are_numbered_through",
    ),
    Mutant(
        "stability_lab/logs/columns.py",
        "2 * counts[column] < most",
        "False",
        f"{TEST_LOGS}::test_a_loss_that_is_nearly_empty_is_passed_over",
    ),
    # Checkpoints: finite, whole, checked; and a state that leaves nothing out.
    Mutant(
        CHECKPOINT,
        "if not all(bool(t.isfinite().all()) for t in model.values()):",
        "if False:",
        f"{TEST_CHECKPOINT}::test_last_never_holds_weights_that_are_not_finite",
    ),
    Mutant(
        CHECKPOINT,
        "if _sha256(path / name) != hashes.get(name):",
        "if False:",
        f"{TEST_CHECKPOINT}::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
    ),
    Mutant(
        CHECKPOINT,
        'for path in (folder / f"{LAST}.new", folder / LAST, *_older(folder)):\n        if not path.is_dir()',
        "for path in (folder / LAST, *_older(folder)):\n        if not path.is_dir()",
        f"{TEST_CHECKPOINT}::test_a_process_may_die_at_any_moment",
    ),
    Mutant(
        CHECKPOINT,
        "AUTO_SHARE * (now - started)",
        "(now - started)",
        f"{TEST_CHECKPOINT}::test_auto_is_a_minute_and_longer_where_writing_takes_long",
    ),
    Mutant(
        LOOP,
        'torch.set_rng_state(tensors["random/cpu"])',
        'tensors["random/cpu"].sum()',
        f"{TEST_LOOP_STATE}::test_it_goes_on_bit_for_bit",
    ),
    Mutant(STEP, "target.copy_(tensors[name])", "pass", f"{TEST_LOOP_STATE}::test_it_goes_on_bit_for_bit"),
    Mutant(RESUME, "if not _may_change(key):", "if False:", f"{TEST_RESUME}::test_another_configuration_is_refused"),
    Mutant(
        RESUME,
        'if step and known.get("data")',
        'if not step and known.get("data")',
        f"{TEST_RESUME}::test_other_data_is_refused",
    ),
    Mutant(
        JSONL, "number > step", "number >= step", f"{TEST_JSONL}::test_rows_after_a_step_are_set_aside_and_none_is_lost"
    ),
    Mutant(
        LOCK,
        "if _is_current(path, descriptor):",
        "if True:",
        f"{TEST_LOCK}::test_a_lock_whose_file_was_removed_in_the_meantime_is_not_held",
    ),
    Mutant(
        SIGNALS,
        "if not (first and self.can_wait):",
        "if not self.can_wait:",
        f"{TEST_SIGNALS}::test_twice_stops_at_once_and_leaves_the_checkpoint_before",
    ),
    # Data: headers and positions of token files, the check of every id, shards that read as one.
    Mutant(
        FORMATS,
        "LLMC_HEADER_BYTES = 256 * 4",
        "LLMC_HEADER_BYTES = 256",
        f"{TEST_FORMATS}::test_damaged_files_are_named",
    ),
    Mutant(
        FORMATS,
        "starts[documents[documents < n_sequences]]",
        "starts[documents[documents < n_sequences] - 1]",
        f"{TEST_FORMATS}::test_megatron_has_documents_and_both_names",
    ),
    Mutant(SCAN, "ids.max() < vocab_size", "ids.max() <= vocab_size", f"{TEST_TOKENS}::test_the_place_of_a_bad_id"),
    Mutant(SCAN, "{position + at:,}", "{at:,}", f"{TEST_TOKENS}::test_the_place_of_a_bad_id"),
    Mutant(
        SHARDS,
        "place = -len(self.parts[part]) if",
        "place = -1 if",
        f"{TEST_SHARDS}::test_shards_read_as_one_array",
    ),
    # The order of samples, repeats, documents.
    Mutant(
        LOADER,
        "% np.uint64(len(self._windows))",
        "% np.uint64(len(self._windows) - 1)",
        f"{TEST_LOADER}::test_random_windows_start_anywhere_and_equally_often",
    ),
    Mutant(
        REPEATS,
        "need = (repeats - 1) * period",
        "need = repeats * period",
        f"{TEST_REPEATS}::test_exactly_32_repeats_count",
    ),
    Mutant(REPEATS, "step = need // 4", "step = need // 3", f"{TEST_REPEATS}::test_agrees_with_the_obvious_way"),
    Mutant(LOOP, "if masked.any():", "if masked.all():", f"{TEST_MASKS}::test_the_loss_is_that_of_the_other_sequences"),
    Mutant(DOCUMENTS, "if not mark.begins:", "if mark.begins:", f"{TEST_DOCUMENTS}::test_numbers_of_documents"),
    Mutant(
        ATTENTION,
        "documents_BT[:, start : start + c]",
        "documents_BT[:, :c]",
        f"{TEST_DOCUMENTS}::test_a_document_gives_what_it_gives_alone",
    ),
    # Preparation: what a resumed call knows, and that a filter drops. Streams: what a checkpoint holds.
    Mutant(
        PREPARE,
        "_chunks(source, state.read)",
        "_chunks(source, state.read + 1)",
        f"{TEST_PREPARE}::test_ids_are_those_that_training_makes",
    ),
    Mutant(
        PREPARE,
        "self.counts = np.load(folder / state.counts, allow_pickle=False)",
        "pass",
        f"{TEST_PREPARE}::test_an_interrupted_call_goes_on",
    ),
    Mutant(
        HUB,
        '"left": self._left.tolist(),',
        '"left": [],',
        f"{TEST_HUB}::test_a_saved_state_goes_on_exactly",
    ),
    Mutant(
        HUB,
        'f"{options!r}{files}".encode()',
        'f"{options!r}".encode()',
        f"{TEST_HUB}::test_the_fingerprint_is_that_of_the_training_text_too",
    ),
    Mutant(
        HUB,
        "        if next(_texts(rows, source), None) is None:\n            raise _nothing_left(source)\n",
        "",
        f"{TEST_HUB}::test_too_few_documents_are_refused_before_anything_is_made",
    ),
    Mutant(
        HUB,
        "return max(1, seen // LOCAL_VAL_EVERY)",
        "return VAL_DOCUMENTS",
        f"{TEST_HUB}::test_of_local_files_a_twentieth_is_validation",
    ),
    Mutant(
        NETWORK,
        "if error.code < 500 and error.code != PROXY_REFUSES:",
        "if True:",
        "tests/data/test_network.py::test_only_an_answer_counts",
    ),
    Mutant(
        PREPARED,
        "if sha256 != wanted:",
        "if False:",
        f"{TEST_PREPARE}::test_a_damaged_shard",
    ),
    Mutant(
        FORMATS,
        "upper < SELDOM and",
        "upper == 0 and",
        f"{TEST_FORMATS}::test_most_upper_words_say_it",
    ),
    Mutant(STREAM, 'self._read(state["taken"])', "pass", f"{TEST_HUB}::test_what_is_read_ahead_is_not_lost"),
    Mutant(
        SYNTHETIC,
        "nats[1 : 2 * m : 2] = np.log(self.keys - np.arange(m))",
        "nats[1 : 2 * m : 2] = np.log(self.keys)",
        f"{TEST_SYNTHETIC}::test_documents_carry_exactly_the_entropy_rate",
    ),
    Mutant(
        HF_TOKENIZER,
        "        self.__dict__.update(state)\n        self._backend.encode_special_tokens = True",
        "        self.__dict__.update(state)",
        f"{TEST_HF_TOKENIZER}::test_workers_get_an_equal_one",
    ),
    Mutant(TEXT, 'file.read(2) == b"\\x1f\\x8b"', "False", f"{TEST_TEXT}::test_rows_are_documents"),
    Mutant(
        f"{FIGURES}/decision.py",
        "change and change.significant",
        "change",
        f"{TEST_FIGURES}::test_the_decision_shows_what_an_arm_costs_and_what_is_not_resolved",
    ),
    Mutant(
        f"{FIGURES}/decision.py",
        "if math.isfinite(loss) and lr not in near",
        "if math.isfinite(loss) and lr in near",
        f"{TEST_FIGURES}::test_the_decision_shows_what_an_arm_costs_and_what_is_not_resolved",
    ),
    Mutant(
        "stability_lab/compare/decision.py",
        "difference_by_seed(_at_best(comparison, ladder), _at_best(comparison, other), comparison.paired)",
        "difference_by_seed(_at_best(comparison, other), _at_best(comparison, ladder), comparison.paired)",
        f"{TEST_LADDERS}::test_tuned_compares_each_arm_at_its_own_best",
    ),
    Mutant(
        LADDERS,
        "differences = family([ladder.difference for ladder in result])",
        "differences = [ladder.difference for ladder in result]",
        f"{TEST_FIGURES}::test_the_decision_is_that_of_the_sentences",
    ),
)


def left_out(folder: str, names: list[str]) -> list[str]:
    """What the copy does without: outputs, caches and virtual environments of any name."""
    return [name for name in names if name in NOT_COPIED or Path(folder, name, "pyvenv.cfg").exists()]


def copied_environment(copy: Path) -> dict[str, str]:
    """The copy's code comes before an editable install of the checkout, in child processes too."""
    # No byte code: a .pyc counts as current when size and second of its source match, as a mutant's can.
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def check_import(copy: Path) -> None:
    command = [sys.executable, "-c", "import stability_lab; print(stability_lab.__file__)"]
    found = subprocess.run(
        command, cwd=copy, env=copied_environment(copy), capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).resolve().is_relative_to(copy.resolve()):
        sys.exit(f"error: the tests would import {found} and not the copy in {copy}.")


def run_tests(copy: Path, targets: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *targets]
    return subprocess.run(
        command, cwd=copy, env=copied_environment(copy), capture_output=True, text=True, timeout=TEST_LIMIT_S
    )


def judge(copy: Path, mutant: Mutant) -> str:
    """`killed`, `survived`, or `error: ...` where the mutant says nothing about its test."""
    path = copy / mutant.file
    if not path.is_file():
        return "error: no such file"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        return f"error: the old text stands {count} times in the file, not once"
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = run_tests(copy, [mutant.test]).returncode
    except subprocess.TimeoutExpired:
        return f"error: no result within {TEST_LIMIT_S} s"
    finally:
        path.write_text(source, encoding="utf-8")
    # Pytest's other codes (2 collection, 4 usage, 5 nothing collected) mean a mutant that breaks the import.
    return {0: "survived", 1: "killed"}.get(code, f"error: pytest ended with exit code {code}")


def describe(mutant: Mutant) -> str:
    return f"{mutant.file}: {' '.join(mutant.old.split())}  ->  {' '.join(mutant.new.split())}"


def main(words: list[str]) -> int:
    mutants = [m for m in MUTANTS if not words or any(word in m.file or word in m.test for word in words)]
    if not mutants:
        print(f"error: no mutant matches {' '.join(words) or 'an empty list'}.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="stability-lab-mutants-") as folder:
        copies: Queue[Path] = Queue()
        for number in range(os.cpu_count() or 1):
            copy = Path(folder) / f"checkout-{number}"
            shutil.copytree(ROOT, copy, ignore=left_out)
            copies.put(copy)
        copy = copies.get()
        check_import(copy)
        before = run_tests(copy, ["-n", "auto", *sorted({mutant.test for mutant in mutants})])
        copies.put(copy)
        if before.returncode != 0:
            print(before.stdout + before.stderr, file=sys.stderr)
            print("error: the tests fail without any mutant.", file=sys.stderr)
            return 1

        def tried(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                result = judge(copy, mutant)
            finally:
                copies.put(copy)
            print(f"{result:<10} {describe(mutant)}  [{mutant.test}]", flush=True)
            return result

        with ThreadPoolExecutor(copies.qsize()) as pool:
            results = list(pool.map(tried, mutants))
    unnoticed = sum(result != "killed" for result in results)
    print(f"{len(results) - unnoticed} of {len(results)} mutants killed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
