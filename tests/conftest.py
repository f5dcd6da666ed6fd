"""One thread, as every task has by default: two would fight with the tests' own worker processes.

Which tests README's command leaves to `.ci/run` is said here, in one table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

FOLDER = Path(__file__).parent
LONG: Mapping[str, int] = {
    "benchmarks/test_benchmarks.py::test_tiny_benchmark_prints_its_figures": 1,
    "docs/test_notebooks.py::test_a_notebook_runs_and_gives_its_page": 1,
    "docs/test_recipes.py::test_a_quick_run_writes_its_page": 1,
    "fedsim/data/test_federated_runs.py::test_a_task_runs_from_its_files_to_its_metrics": 0,
    "fedsim/learning/test_adapters.py::test_a_run_with_adapters_sends_what_the_plan_says": 0,
    "fedsim/learning/test_frozen.py::test_a_run_sends_the_trained_part_and_its_plan_is_exact": 1,
    "fedsim/wire/test_masks.py::test_what_is_decoded_is_a_mask_with_the_mean_q": 2,
    "golden/test_golden.py::test_recorded_run_has_the_recorded_bits": 2,
    "launch/test_chaos.py::test_a_disturbed_run_has_the_bits_of_an_undisturbed_one": 2,
    "launch/test_chaos.py::test_so_has_one_with_edge_servers": 1,
    "launch/test_chaos.py::test_so_has_one_with_workers_elsewhere": 0,
    "launch/test_device_costs.py::test_it_does_not_depend_on_workers": 1,
    "launch/test_edge_servers.py::test_an_edge_server_that_hangs_is_replaced": 0,
    "launch/test_edge_servers.py::test_an_edge_server_that_is_killed_is_made_good": 1,
    "launch/test_edge_servers.py::test_the_bits_and_rows_are_those_of_one_process": 2,
    "launch/test_engines.py::test_a_mixed_run_goes_on_with_as_many_workers_here_as_before": 0,
    "launch/test_engines.py::test_a_run_on_ray_that_is_ended_leaves_nothing_and_goes_on": 0,
    "launch/test_engines.py::test_a_starters_ranks_are_the_workers": 0,
    "launch/test_engines.py::test_a_stopped_agent_leaves_no_process": 1,
    "launch/test_engines.py::test_a_sweep_on_ray_is_that_of_one_machine_also_when_a_node_is_lost": 0,
    "launch/test_engines.py::test_every_engine_keeps_the_contract[ray]": 0,
    "launch/test_engines.py::test_ray": 0,
    "launch/test_engines.py::test_without_a_cluster_or_with_an_unknown_option_the_error_says_what_to_do": 0,
    "launch/test_engines.py::test_workers_here_and_elsewhere_share_a_run": 1,
    "launch/test_failed_starts.py::test_the_first_signal_ends_a_start_and_leaves_nothing": 3,
    "launch/test_kubernetes.py::test_its_containers_carry_the_run_with_the_bits_of_one_process": 0,
    "launch/test_mutations.py::test_files_that_change_places_go_on_identically_or_are_refused": 1,
    "launch/test_nth_fault.py::test_whatever_is_written_may_be_the_last": 0,
    "launch/test_power_cut.py::test_a_power_cut_costs_at_most_the_rounds_not_yet_synced": 2,
    "launch/test_remote_edges.py::test_a_worker_that_is_killed_is_made_good_by_another_of_its_site": 0,
    "launch/test_remote_edges.py::test_a_worker_whose_key_is_revoked_at_the_root_is_out": 0,
    "launch/test_remote_edges.py::test_an_edge_server_that_hangs_joins_again": 0,
    "launch/test_remote_edges.py::test_an_edge_server_that_is_killed_and_comes_again_changes_nothing": 0,
    "launch/test_remote_workers.py::test_a_new_start_has_new_keys": 0,
    "launch/test_remote_workers.py::test_a_worker_that_does_not_hear_of_the_end_ends_by_itself": 0,
    "launch/test_remote_workers.py::test_a_worker_that_was_silent_for_too_long_joins_again": 0,
    "launch/test_resume.py::test_a_killed_run_goes_on_with_the_same_bits": 2,
    "launch/test_resume.py::test_killed_again_and_again": 0,
    "launch/test_terminal.py::test_a_run_goes_on_where_its_output_cannot_be_written": 3,
    "protocols/test_fedep.py::test_a_weight_of_a_dead_input_keeps_the_priors_precision": 1,
    "protocols/test_fedpa_least_squares.py::test_fedpa_comes_close_to_the_pooled_solution": 1,
    "protocols/test_fedpm.py::test_masks_learn_with_few_bits": 1,
    "test_bring_your_own.py::test_a_users_algorithm_passes_the_battery": 1,
    "workers/test_histories.py::test_any_history_ends_with_the_same_bits": 1,
    "workers/test_histories.py::test_any_history_with_edge_servers_ends_with_the_same_bits": 1,
    "workers/test_histories.py::test_any_letter_may_be_the_last": 1,
    "workers/test_large_messages.py::test_a_state_of_more_than_two_gibibytes_is_kept": 0,
}
"""By the name of a test, or of a case: how many of its cases README's command runs. The others are marked long."""  # noqa: E501


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond LONG's numbers, before any are selected by their marks."""
    cases: Counter[str] = Counter()
    for item in items:
        path = item.path.relative_to(FOLDER) if item.path.is_relative_to(FOLDER) else item.path
        case = f"{path}::{item.name}"
        name = case if case in LONG else case.partition("[")[0]
        cases[name] += 1
        if name in LONG and cases[name] > LONG[name]:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", autouse=True)
def _denormals() -> Iterator[None]:
    """A run in process flushes denormals to zero; no module leaves that to the next."""
    yield
    torch.set_flush_denormal(False)
