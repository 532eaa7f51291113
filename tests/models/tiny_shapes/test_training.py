"""The training script runs, learns, and writes what the pipeline loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from omnistage.models.tiny_shapes.judge import Judge
from omnistage.models.tiny_shapes.network import HIDDEN_WIDTH, HiddenPainter, Painter, load_weights
from omnistage.models.tiny_shapes.quality import measure
from omnistage.models.tiny_shapes.stage import WEIGHTS
from omnistage.models.tiny_shapes.train import train
from omnistage.models.tiny_shapes.training import PainterTrainer, Recipe, orthogonal, train_judge


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_update_of_a_matrix_is_nearly_orthogonal() -> None:
    for shape in ((8, 24), (24, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.4


def test_rate_warms_up_stays_and_falls() -> None:
    recipe = Recipe(seconds=1, warmup=10, decay_from=0.5)
    assert recipe.rate_at(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate_at(50, 0.4) == 1.0
    assert recipe.rate_at(50, 0.75) == pytest.approx(0.5)
    assert recipe.rate_at(50, 1.0) == 0.02


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_are_repeatable() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        trainer = PainterTrainer(Painter(), Recipe(seconds=1e9, batch=8, warmup=3, seed=3))
        losses.append([trainer.step(step, 1.0) for step in range(12)])
    assert losses[0] == losses[1]
    assert sum(losses[0][-4:]) < 0.8 * sum(losses[0][:4])


def test_painter_that_reads_hidden_states_takes_steps_and_tells_captions_from_none() -> None:
    torch.manual_seed(0)
    painter = HiddenPainter()
    trainer = PainterTrainer(
        painter, Recipe(seconds=1e9, batch=4, warmup=1), lambda asked: torch.randn(len(asked), 11, HIDDEN_WIDTH)
    )
    before = painter.hidden_in.weight.clone()
    for step in range(3):
        trainer.step(step, 1.0)
    assert not torch.equal(painter.hidden_in.weight, before)
    rows = painter.text_rows(torch.zeros(1, 11, HIDDEN_WIDTH)) - painter.word_places[:11]
    assert torch.allclose(rows, painter.free.expand_as(rows), atol=1e-6)
    assert not torch.allclose(painter.text_rows(torch.ones(1, 11, HIDDEN_WIDTH)), rows)


@pytest.mark.slow
def test_script_writes_weights_that_load_and_a_report(tmp_path: Path) -> None:
    train(tmp_path, minutes=0.05, seed=1, pictures=8)
    load_weights(Painter(), tmp_path / "painter.safetensors")
    load_weights(Judge(), tmp_path / "judge.safetensors")
    report = json.loads((tmp_path / "quality.json").read_text())
    assert report["seed"] == 1
    assert 0 <= report["quality"]["all_attributes"] <= 1


@pytest.mark.slow
def test_judge_learns() -> None:
    lines: list[str] = []
    train_judge(Judge(), steps=101, seed=1, batch=32, log=lines.append)
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (lines[0], lines[-1]))
    assert last < 0.8 * first


@pytest.mark.slow
def test_report_in_the_package_tells_the_quality_that_is_measured() -> None:
    painter, judge = Painter(), Judge()
    load_weights(painter, WEIGHTS)
    load_weights(judge, WEIGHTS.parent / "judge.safetensors")
    told = json.loads((WEIGHTS.parent / "quality.json").read_text())["quality"]
    measured = measure(painter, judge, 64)
    assert told["all_attributes"] >= 0.9
    assert measured.all_attributes >= 0.9
