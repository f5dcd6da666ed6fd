"""fedsim card: its numbers are the run's, seeds are one card, and the checklist says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from scipy import stats

from launch.cli import main
from launch.results.card import of, only_group
from launch.results.report import render
from launch.runs.folder import RunFolder
from tests.launch.run_folders import Make


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["card", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def row(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return line.removeprefix(f"| {name} |").removesuffix("|").strip()


def test_the_card_of_a_real_run_has_its_bytes_digests_and_source(launched: Callable[..., Path]) -> None:
    folder = launched("card", rounds=2, algo="fedlap_cov", model="logistic", clients=3)
    invoke(folder)
    text, run = (folder / "card.md").read_text(), RunFolder.open(folder)
    summary = run.summary
    assert row(text, "bytes down, up") == f"{summary['bytes_down']:,}, {summary['bytes_up']:,}"
    assert row(text, "P") == f"{summary['params']:,}"
    assert row(text, "source") == "Swaroop, Khan, Doshi-Velez 2025, Eq. 21"
    assert "local training starts from the shared random start" in row(text, "differs from it")
    assert summary["model_sha256"][:16] in text and run.experiment["data"] in text
    assert row(text, "broadcasts to a client") == "2"
    assert "- [ ] one seed: no comparison; 5 seeds allow one" in text
    assert "- [ ] the ledger was not compared with the kernel" in text
    assert (folder / "card.html").read_text().count("<h2>") == text.count("\n## ")
    assert "one seed: no comparison" in render(run), "the report has the checklist"


def test_coded_fields_have_their_cost_and_loss(launched: Callable[..., Path]) -> None:
    codecs = {"up.mean": "sigma:auto+dither", "up.precision": "ratio:0.25"}
    folder = launched("coded", rounds=2, algo="fedlap_cov", model="logistic", clients=3, codecs=codecs)
    text, run = of(only_group([folder])).markdown(), RunFolder.open(folder)
    mean = run.summary["limits"]["up"]["mean"]
    bits, entropy, step, rounding = row(text, "up.mean").split(" | ")
    assert (bits, entropy) == (f"{mean['bits']:.2f}", f"{mean['entropy']:.2f}")
    assert (step, rounding) == (f"{mean['step']:.3g}", f"{mean['rounding']:.3f}")
    assert row(text, "up.precision").endswith("– | –")


def test_the_card_in_the_documentation_has_the_rows_of_today(launched: Callable[..., Path]) -> None:
    folder = launched("card", rounds=2, algo="fedlap_cov", model="logistic", clients=3)
    page = (Path(__file__).resolve().parents[2] / "docs/results/readme_card.md").read_text()
    written, today = (
        {line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")}
        for text in (page, of(only_group([folder])).markdown())
    )
    assert written == today, "run docs/recipes/readme_card.py"


def test_seeds_are_one_card_with_student_s_interval(make: Make) -> None:
    scores = [0.6, 0.62, 0.59, 0.61, 0.64]
    for seed, score in enumerate(scores):
        folder = make(f"a{seed}", (0.1, 0.5, score), seed=seed)
    text = of(only_group([folder.parent])).markdown()
    half = stats.ttest_1samp([100 * x for x in scores], 0).confidence_interval(0.95)
    line = row(text, "accuracy %")
    assert line.startswith(f"61.2 | ± {(half.high - half.low) / 2:.1f} | 5 | 60.0, 62.0, 59.0, 61.0, 64.0")
    assert "- [x] n = 5: a comparison is possible" in text


def test_a_diverged_or_unfinished_run_is_on_the_checklist(make: Make) -> None:
    make("a0", (0.5, 0.4, 0.1), seed=0)  # the helper's NLL is 1 - accuracy: it rises
    text = of(only_group([make("a1", (0.1, 0.2, 0.5), seed=1, codecs={"mean": "bf16"})])).markdown()
    assert "- [ ] codecs may lose precision" in text and "- [x] no run diverged" in text
    folder = make("b", (0.5, 0.4, 0.1), algo="fedprox", status="failed")
    text = of(only_group([folder])).markdown()
    assert "- [ ] diverged: seed 0" in text and "- [ ] seed 0 is failed" in text


def test_a_seed_without_a_score_and_a_seed_that_failed_are_named(make: Make) -> None:
    for seed in range(3):
        make(f"a{seed}", (0.1, 0.5, None if seed == 1 else 0.6), seed=seed)
    folder = make("a7", (0.1, 0.2, 0.3), seed=7, status="failed")
    text = of(only_group([folder.parent])).markdown()
    assert "diverged" in row(text, "accuracy %") and "left out: another run of seed 7, failed" in text


def test_a_run_that_has_not_ended_has_a_card(make: Make) -> None:
    folder = make("a", status=None)
    text = of(only_group([folder])).markdown()
    assert row(text, "name") == "fedavg" and "- [ ] seed 0 is " in text
    (folder / "metrics.jsonl").unlink()
    assert "Traceback" not in CliRunner().invoke(main, ["card", str(folder)]).output


def test_mistakes_are_errors_in_one_line(make: Make, tmp_path: Path) -> None:
    make("a")
    folder = make("b", algo="fedprox")
    for arguments, error in (
        ([folder.parent], "a card is of one configuration"),
        ([folder, "--out", tmp_path / "card.pdf"], "a card is a .md or a .html file"),
        ([tmp_path / "nothing"], "no run folder"),
    ):
        result = CliRunner().invoke(main, ["card", *map(str, arguments)])
        assert result.exit_code == 2 and error in result.output and "Traceback" not in result.output
    assert invoke(folder, "--out", tmp_path / "c.html").strip() == str(tmp_path / "c.html")
