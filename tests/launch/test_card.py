"""fedsim card: its numbers are the run's, seeds are one card, and the checklist says what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from markupsafe import escape
from scipy import stats

from fedsim.printable import markdown
from launch.cli import main
from launch.results.card import Card, card
from launch.results.groups import gather
from launch.results.html import Page
from launch.results.report import page_of
from launch.runs.folder import RunFolder
from tests.launch.run_folders import Make


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["card", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def card_of(folder: Path) -> Card:
    (group,) = gather([folder])
    return card(group)


def row(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return line.removeprefix(f"| {name} |").removesuffix("|").strip()


def test_the_card_of_a_real_run_has_its_bytes_digests_and_source(launched: Callable[..., Path]) -> None:
    folder = launched("card", rounds=2, algo="fedlap_cov", model="logistic", clients=3)
    invoke(folder)
    text, run = (folder / "card.md").read_text(), RunFolder.open(folder)
    summary = run.summary
    assert row(text, "bytes") == f"{summary['bytes_down']:,} down, {summary['bytes_up']:,} up"
    assert row(text, "params") == str(summary["params"])
    assert row(text, "source") == "Swaroop, Khan, Doshi-Velez 2025, Eq. 21 https://arxiv.org/abs/2501.17325"
    assert "local training starts from the shared random start" in row(text, "differs from it")
    assert summary["model_sha256"] in text and run.experiment["data"] in text
    assert row(text, "broadcasts to a client") == "2"
    assert "- [ ] one seed: no comparison; 5 seeds allow one" in text
    assert "- [ ] the ledger was not compared with the kernel" in text
    pages = (folder / "card.html").read_text(), page_of(run).html()  # the report has the same card
    for rows in card_of(folder).sections.values():
        for name, value in rows.items():
            assert row(text, name) == markdown(value)
            assert all(f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" in page for page in pages)
    assert all("one seed: no comparison" in page for page in pages)


def test_coded_fields_have_their_cost_and_loss(launched: Callable[..., Path]) -> None:
    codecs = {"up.mean": "sigma:auto+dither", "up.precision": "ratio:0.25"}
    folder = launched("coded", rounds=2, algo="fedlap_cov", model="logistic", clients=3, codecs=codecs)
    text, run = card_of(folder).markdown(), RunFolder.open(folder)
    mean = run.summary["limits"]["up"]["mean"]
    expected = ", ".join(f"{key} {mean[key]:.4g}" for key in ("bits", "entropy", "step", "rounding"))
    assert row(text, "up.mean, first seed, last evaluated round") == expected
    assert "step" not in row(text, "up.precision, first seed, last evaluated round")


def test_the_sections_of_a_card_are_those_of_the_documentation(launched: Callable[..., Path]) -> None:
    folder = launched("card", rounds=2, algo="fedlap_cov", model="logistic", clients=3)
    page = (Path(__file__).resolve().parents[2] / "docs/what-a-number-is-worth.md").read_text()
    described = re.findall(
        r"^\| (\w.*?) \|", page.partition("\n| section | content |\n")[2].partition("\n\n")[0], re.M
    )
    card = card_of(folder).markdown()
    assert described == re.findall(r"^## (.*)$", card, re.M)
    listed, today = (set(re.findall(r"^- \[.\] (.*)$", text, re.M)) for text in (page, card))
    assert len(listed & today) > 9, "run docs/recipes/readme_card.py"


def test_seeds_are_one_card_with_student_s_interval(make: Make) -> None:
    scores = [0.6, 0.62, 0.59, 0.61, 0.64]
    for seed, score in enumerate(scores):
        folder = make(f"a{seed}", (0.1, 0.5, score), seed=seed)
    text = card_of(folder.parent).markdown()
    half = stats.ttest_1samp([100 * x for x in scores], 0).confidence_interval(0.95)
    line = row(text, "accuracy %")
    each = "n = 5 (seeds 0, 1, 2, 3, 4: 60.0, 62.0, 59.0, 61.0, 64.0)"
    assert line == f"61.2 ± {(half.high - half.low) / 2:.1f}, {each}"
    assert "- [x] n = 5: a comparison is possible" in text


def test_an_algorithm_of_a_file_elsewhere_is_not_in_the_commit(
    launched: Callable[..., Path], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from protocols.fedavg import FedAvg as Mine\n", encoding="utf-8")
    folder = launched("mine", rounds=1, algo=f"{mine}:Mine", model="logistic", clients=2)
    assert "not in the commit: mine.py" in card_of(folder).markdown()


def test_a_diverged_or_unfinished_run_is_on_the_checklist(make: Make) -> None:
    make("a0", (0.5, 0.4, 0.1), seed=0)  # the helper's NLL is 1 - accuracy: it rises
    text = card_of(make("a1", (0.1, 0.2, 0.5), seed=1, codecs={"mean": "bf16"})).markdown()
    assert "- [ ] codecs may lose precision" in text and "- [x] no run diverged" in text
    folder = make("b", (0.5, 0.4, 0.1), algo="fedprox", status="failed")
    text = card_of(folder).markdown()
    assert "- [ ] diverged: seed 0" in text and "- [ ] seed 0 is failed" in text


def test_a_seed_without_a_score_and_a_seed_that_failed_are_named(make: Make) -> None:
    for seed in range(3):
        make(f"a{seed}", (0.1, 0.5, None if seed == 1 else 0.6), seed=seed)
    folder = make("a7", (0.1, 0.2, 0.3), seed=7, status="failed")
    text = card_of(folder.parent).markdown()
    assert "diverged" in row(text, "accuracy %") and "left out: another run of seed 7, failed" in text


def test_a_run_that_has_not_ended_has_a_card(make: Make) -> None:
    folder = make("a", status=None)
    text = card_of(folder).markdown()
    assert row(text, "algo") == "fedavg" and "- [ ] seed 0 is " in text
    (folder / "metrics.jsonl").unlink()
    assert "Traceback" not in CliRunner().invoke(main, ["card", str(folder)]).output


def test_text_of_a_run_is_not_markup(make: Make) -> None:
    created = card_of(make("a", dataset="<script>x</script>\n# Results | \x1b[2J"))
    for text in (created.markdown(), Page.of(created.title, created.parts()).html()):
        assert "<script>" not in text and "&lt;script" in text
    text = created.markdown()
    assert "\n# Results" not in text and "\x1b" not in text and "Results \\|" in text


def test_mistakes_are_errors_in_one_line(make: Make, tmp_path: Path) -> None:
    make("a")
    folder = make("b", algo="fedprox")
    for arguments, error in (
        ([folder.parent, "--out", tmp_path / "card.md"], "a card is of one configuration"),
        ([folder, "--out", tmp_path / "card.pdf"], "a card is a .md or a .html file"),
        ([tmp_path / "nothing"], "no run folder"),
    ):
        result = CliRunner().invoke(main, ["card", *map(str, arguments)])
        assert result.exit_code == 2 and error in result.output and "Traceback" not in result.output
    assert invoke(folder, "--out", tmp_path / "c.html").strip() == str(tmp_path / "c.html")


def test_a_sweep_has_a_card_for_each_configuration(make: Make) -> None:
    """In the folder of its first run; a title has no folder of a file."""
    make("a0", dataset="/somewhere/rows.csv,label=y")
    make("a1", dataset="/somewhere/rows.csv,label=y", seed=1)
    runs = make("b", algo="/somewhere/mine.py:Mine").parent
    written = invoke(runs).split()
    assert written == [
        str(runs / name) for name in ("a0/card.md", "a0/card.html", "b/card.md", "b/card.html")
    ]
    assert (runs / "a0" / "card.md").read_text().startswith("# fedavg on rows.csv,label=y, 2 seeds")
    assert (runs / "b" / "card.md").read_text().startswith("# mine:Mine on ")
