"""Headings of options in the `--help` of serving commands, by field name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

GROUPED_COMMANDS: Final = frozenset({"serve", "coordinator", "draft-worker", "target-worker"})
OTHER: Final = "Options"

GROUPS: Final = {
    "Model": (
        "target_model draft_model model tokenizer model_name chat_template generation_config max_model_len "
        "dtype target_dtype draft_dtype trust_remote_code"
    ),
    "Ports": (
        "host port http http_port target_port draft_port targets drafts join_port join advertise "
        "local_sockets local_socket"
    ),
    "Speculation": (
        "num_speculative_tokens max_num_speculative_tokens num_speculative_tokens_per_batch_size "
        "tree_width max_tree_nodes drafts_per_sequence acceptance drafter corpus sub_drafter "
        "lookahead_branches lookahead_sequences pre_verify sources prompt_lookup prompt_lookup_min "
        "prompt_lookup_max suffix_max_tree_depth suffix_max_spec_factor suffix_min_token_prob "
        "suffix_cached_requests"
    ),
    "Memory": (
        "num_blocks target_num_blocks draft_num_blocks gpu_memory_utilization "
        "target_gpu_memory_utilization draft_gpu_memory_utilization block_size prefix_cache max_sequences"
    ),
    "Devices": (
        "device target_device draft_device threads target_threads draft_threads cuda_graphs attention_backend"
    ),
    "Requests": (
        "max_running max_waiting max_request_seconds max_batch_tokens max_mixed_prefill_tokens "
        "resume_seconds unread_timeout drain_timeout handover_timeout"
    ),
    "Security": (
        "api_keys certificates tls_certificate tls_key tls_ca worker_secret_file worker_tls_certificate "
        "worker_tls_key worker_tls_ca"
    ),
    "Observability": (
        "log_format log_stats_seconds otlp_traces_endpoint otlp_traces_sampling_ratio metrics_port "
        "target_metrics_port draft_metrics_port tenant_metrics reflection"
    ),
    "Expert": (
        "deterministic draft_timeout target_timeout recovery_timeout start_timeout lease_seconds "
        "support_mass support_bound exit_with_parent"
    ),
}
"""In the order of the help: common options come first."""

_GROUP_OF: Final = {name: title for title, names in GROUPS.items() for name in names.split()}


def group_of(field: str) -> str | None:
    """The heading of a field's option; None if it has none."""
    return _GROUP_OF.get(field)


def in_order(titles: Iterable[str]) -> list[str]:
    """Sort headings: arguments, then the groups, then other options."""
    order = ["Arguments", *GROUPS, OTHER]
    return sorted(titles, key=order.index)
