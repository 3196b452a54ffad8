"""Training programs of other packages, unmodified but for the watch line: the same weights, and every update a step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradexporter.monitor import Monitor

pytestmark = pytest.mark.slow

Watch = Callable[..., Monitor]


@contextmanager
def of(package: str) -> Iterator[None]:
    """Skips where ``package`` is not installed, and is deaf to its warnings, which are not ours."""
    pytest.importorskip(package, reason=f"{package} comes with `make test-slow`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def healthy(monitor: Monitor, steps: int) -> None:
    assert monitor.flush()
    snapshot = monitor.snapshot
    assert snapshot is not None
    assert snapshot.steps_applied == steps
    assert snapshot.steps_skipped == 0
    assert monitor.report is not None
    assert monitor.report.gradient_norm is not None
    assert monitor.report.activation_max_abs is not None
    assert monitor.report.learning_rate is not None


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "bf16": True}], ids=["plain", "bf16"])
def test_the_trainer_of_transformers_with_accumulation_clipping_and_evaluation(
    watch: Watch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with of("accelerate"):
        import transformers

        rows = torch.randint(3, 64, (64, 16), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in rows]

        class Watching(transformers.TrainerCallback):
            """As a user would add it."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                self.monitor = watch(given["model"], given["optimizer"])

        def trained(*callbacks: Any) -> tuple[list[Tensor], list[Any]]:
            transformers.set_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
            )
            arguments = transformers.TrainingArguments(
                str(tmp_path),
                num_train_epochs=2,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_grad_norm=0.5,
                logging_steps=2,
                eval_strategy="epoch",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                **settings,
            )
            model = transformers.LlamaForCausalLM(config)
            trainer = transformers.Trainer(
                model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks)
            )
            trainer.train()
            return weights(model), [entry.get("loss") for entry in trainer.state.log_history]

        alone = trained()
        callback = Watching()
        watched = trained(callback)

    assert all(map(torch.equal, watched[0], alone[0]))
    assert watched[1] == alone[1]
    healthy(callback.monitor, 16)
    report = callback.monitor.report
    assert report is not None
    assert report.clip_factor == pytest.approx(0.5 / (report.gradient_norm or 0.0), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 48), ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}, 24)],
    ids=["plain", "bf16"],
)
def test_the_transformer_of_lightning_demos(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], steps: int
) -> None:
    """Lightning runs forward and backward in a closure of the optimizer's step."""
    with of("lightning"):
        import lightning
        from lightning.pytorch.demos import LightningTransformer

        monkeypatch.chdir(tmp_path)
        drawn = random.Random(0)
        words = [" ".join(f"w{drawn.randrange(40)}" for _ in range(34)) for _ in range(25)]
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "wikitext-2.txt").write_text("\n".join(words))  # where the demo keeps its download

        class Watching(lightning.Callback):
            """As a user would add it."""

            def on_train_start(self, trainer: Any, module: Any) -> None:
                self.monitor = watch(module, trainer.optimizers)

        def trained(*callbacks: Any) -> list[Tensor]:
            lightning.seed_everything(0, verbose=False)
            model = LightningTransformer(vocab_size=50)
            quiet = dict.fromkeys(
                ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
            )
            trainer = lightning.Trainer(
                max_epochs=2, accelerator="cpu", devices=1, callbacks=list(callbacks), **quiet, **settings
            )
            trainer.fit(model)
            return weights(model)

        alone = trained()
        callback = Watching()
        watched = trained(callback)

    assert all(map(torch.equal, watched, alone))
    healthy(callback.monitor, steps)


def test_the_loop_of_accelerate_with_accumulation(watch: Watch) -> None:
    with of("accelerate"):
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        def trained(watching: bool) -> tuple[list[Tensor], Any]:
            set_seed(0)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(0, 3, (160,)))
            loader: Any = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            monitor = watch(model, optimizer) if watching else None
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            return weights(model), monitor

        alone, _ = trained(False)
        watched, monitor = trained(True)

    assert all(map(torch.equal, watched, alone))
    healthy(monitor, 10)
