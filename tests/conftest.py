"""One thread, as every task has by default: two would fight with the tests' own worker processes.

Which tests README's command leaves to `.ci/run` is said here, in one table.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

FOLDER = Path(__file__).parent
LONG: Mapping[str, float] = {
    "benchmarks/test_benchmarks.py::test_tiny_benchmark_prints_its_figures": 1,
    "docs/test_code_blocks.py::test_blocks_without_a_mark_run": 3,
    "docs/test_notebooks.py::test_a_notebook_runs_and_gives_its_page": 1,
    "docs/test_recipes.py::test_a_quick_run_writes_its_page": 1,
    "fedsim/learning/test_frozen.py::test_a_run_sends_the_trained_part_and_its_plan_is_exact": 0,
    "fedsim/test_examples.py::test_the_example_gives_what_it_says[sweep]": 0,
    "golden/test_golden.py::test_recorded_run_has_the_recorded_bits": 2,
    "launch/test_chaos.py::test_a_disturbed_run_has_the_bits_of_an_undisturbed_one": 0,
    "launch/test_device_costs.py::test_it_does_not_depend_on_workers": 1,
    "launch/test_engines.py::test_a_mixed_run_goes_on_with_as_many_workers_here_as_before": 0,
    "launch/test_engines.py::test_a_run_on_ray_that_is_ended_leaves_nothing_and_goes_on": 0,
    "launch/test_engines.py::test_a_starters_ranks_are_the_workers": 0,
    "launch/test_engines.py::test_a_stopped_agent_leaves_no_process": 0,
    "launch/test_engines.py::test_an_agent_starts_a_killed_worker_again_and_ends_with_its_workers": 0,
    "launch/test_engines.py::test_every_engine_keeps_the_contract[ray]": 0,
    "launch/test_engines.py::test_ray": 0,
    "launch/test_engines.py::test_without_a_cluster_or_with_an_unknown_option_the_error_says_what_to_do": 0,
    "launch/test_engines.py::test_workers_here_and_elsewhere_share_a_run": 0,
    "launch/test_failed_starts.py::test_the_first_signal_ends_a_start_and_leaves_nothing": 3,
    "launch/test_kubernetes.py::test_its_containers_carry_the_run_with_the_bits_of_one_process": 0,
    "launch/test_nth_fault.py::test_whatever_is_written_may_find_the_disk_full": 0,
    "launch/test_power_cut.py::test_a_power_cut_costs_at_most_the_rounds_not_yet_synced": 1,
    "launch/test_remote_workers.py::test_a_new_start_has_new_keys": 0,
    "launch/test_remote_workers.py::test_a_run_over_ipv6_has_the_same_bits_and_every_byte_is_known": 0,
    "launch/test_remote_workers.py::test_a_run_whose_only_worker_is_refused_ends_soon_and_says_why": 0,
    "launch/test_remote_workers.py::test_a_worker_that_does_not_hear_of_the_end_ends_by_itself": 0,
    "launch/test_remote_workers.py::test_a_worker_that_is_killed_is_made_good_by_others_and_may_come_again": 0,  # noqa: E501
    "launch/test_remote_workers.py::test_a_worker_that_was_silent_for_too_long_joins_again": 0,
    "launch/test_remote_workers.py::test_portable_numerics_give_these_bits_whatever_the_workers_environment": 0,  # noqa: E501
    "launch/test_remote_workers.py::test_with_allow_drift_it_takes_part_and_everybody_says_so": 0,
    "launch/test_resume.py::test_a_killed_run_goes_on_with_the_same_bits": 1,
    "launch/test_run_folder_fuzz.py::test_a_mutated_file_is_an_error_of_one_line_or_harmless": 1 / 4,
    "launch/test_run_files.py::test_a_round_that_was_under_way_is_nowhere_in_the_numbers": 1,
    "launch/test_supervision.py::test_a_process_that_hangs_while_it_starts_is_replaced": 0,
    "launch/test_terminal.py::test_a_run_goes_on_where_its_output_cannot_be_written": 1,
    "protocols/test_event_trigger.py::test_events_for_every_algorithm": 1 / 5,
    "protocols/test_posteriors.py::test_the_average_over_samples_is_not_far_worse_than_the_mean": 1 / 5,
    "protocols/test_trees.py::test_duals_add_up_and_the_plan_is_the_ledger": 1 / 5,
    "protocols/test_trees.py::test_one_edge_server_changes_no_bit": 1 / 5,
    "test_battery.py::test_a_buffer_of_all_clients_is_the_synchronous_run": 1 / 5,
    "test_battery.py::test_a_lost_upload_leaves_no_trace_but_its_bytes": 1 / 4,
    "test_battery.py::test_arrival_order_does_not_matter": 1 / 5,
    "test_battery.py::test_bf16_on_every_field_keeps_the_sums": 1 / 5,
    "test_battery.py::test_codecs_that_merge_values_keep_the_sums": 1 / 4,
    "test_battery.py::test_formulas_in_blocks_give_the_bits_of_whole_vectors": 1 / 5,
    "test_battery.py::test_half_participation_by_name": 1 / 5,
    "test_battery.py::test_in_process_equals_over_zeromq_bit_for_bit": 1 / 5,
    "test_battery.py::test_lossless_codecs_change_nothing_but_bytes": 1 / 5,
    "test_battery.py::test_momentum_and_carry_mean_what_is_documented": 1 / 5,
    "test_battery.py::test_server_and_clients_stay_consistent": 1 / 4,
    "test_battery.py::test_states_that_are_written_over_give_the_bits_of_copies": 1 / 5,
    "test_battery.py::test_sums_hold_under_any_staleness": 1 / 5,
    "test_battery.py::test_sums_hold_under_settings_of_the_solver": 1 / 5,
    "test_bring_your_own.py::test_a_users_algorithm_passes_the_battery": 1,
    "workers/test_histories.py::test_any_history_ends_with_the_same_bits": 1,
    "workers/test_histories.py::test_any_letter_may_be_the_last": 1,
    "workers/test_large_messages.py::test_a_state_of_more_than_two_gibibytes_is_kept": 0,
    "workers/test_probe.py::test_resume_refuses_a_process_that_computes_other_bits": 1,
}
"""By the name of a test, or of a case: how many of its cases README's command runs, the first ones; or, below
1, which share of them, evenly spread. The others are marked long."""


def _is_long(limit: float, case: int) -> bool:
    """Whether the case of this number, from 1, is beyond the limit."""
    return case > limit if limit >= 1 or not limit else (case - 1) % round(1 / limit) > 0


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep the order of the files, of which it would move those with the most tests to the front.
    Let processes that tests start get SIGINT and SIGHUP, which a background job or nohup ignores."""
    config.option.loadscopereorder = False
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond LONG's numbers, before any are selected by their marks; slow files come first.

    Whoever runs files side by side would otherwise wait for a slow one at the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in slow)
    cases: Counter[str] = Counter()
    for item in items:
        path = item.path.relative_to(FOLDER) if item.path.is_relative_to(FOLDER) else item.path
        case = f"{path}::{item.name}"
        name = case if case in LONG else case.partition("[")[0]
        cases[name] += 1
        if name in LONG and _is_long(LONG[name], cases[name]):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", autouse=True)
def _denormals() -> Iterator[None]:
    """A run in process flushes denormals to zero; no module leaves that to the next."""
    yield
    torch.set_flush_denormal(False)
