"""Training loops that the tests compare with an independent reference: what is right, what is absent and why.

The table of limits in the README is written from this list. A test says which loop it is about with
``@pytest.mark.matrix("name")``; every loop has at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

BEGIN = "<!-- loops:begin -->"
END = "<!-- loops:end -->"


@dataclass(frozen=True)
class Loop:
    """One row of the table."""

    title: str
    right: str
    """What is published, and equals the reference."""
    absent: str = ""
    """What is not, and why; empty when nothing is missing."""


LOOPS: dict[str, Loop] = {
    "scaler": Loop(
        "`GradScaler` and its subclasses, passed or not, plain, fused and several optimizers, `unscale_` first",
        "gradients divided by the scale, the scale, skipped steps and the layer that overflowed in them",
        "an `optimizer.step()` past the scaler, without `unscale_`: the gradient as the update used it; "
        '`signal_available{signal="loss_scale"}` is 0',
    ),
    "scale by hand": Loop(
        "a loss that is scaled, and gradients that are divided, by the loop itself or by a scaler of its own",
        "from the second to fifth step on the gradient as the update uses it; before clipping too with our clip",
        "the scale (the signal is 0), and skipped steps: they call nothing; with torch's clip the gradient before it "
        "(`pre_clip` is 0), and a loop that clips at every step looks like clipping alone",
    ),
    "clip": Loop(
        "`clip_grad_norm_`, `clip_grad_value_`, clipping by layer, by parameter, in a closure and by hand",
        "the gradient before clipping, clipped steps, the layer that a norm which is not finite came from",
        "the clip factor where clipping was not one factor for all; what is clipped is told from a few parameters, so "
        "a step of which clipping reached none of them counts as not clipped",
    ),
    "our clip": Loop(
        "`gradexporter.clip_grad_norm_` in place of torch's, accumulation of any length included",
        "torch's result bit for bit, the norm of every layer before clipping from the clip itself",
        "the largest gradient of a layer comes as often as parameters do: the clip does not compute it; half "
        "precision, another norm, parts, shards and GPUs are measured at the end of backward",
    ),
    "accumulation": Loop(
        "gradient accumulation",
        "one step an update, with the gradient of the update",
        "the first update that comes after fewer backwards than the one before is measured after torch's clip "
        "(`pre_clip` is 0); later ones of that length are measured before it",
    ),
    "ddp": Loop(
        "`DistributedDataParallel`: static graph, unused parameters, `no_sync`, `join`, communication hooks",
        "the gradient after its reduction, on every rank; the outputs of the rank's own batch",
    ),
    "reduced after": Loop(
        "gradients that the loop reduces itself, several ranks without a wrapper",
        "the gradient that the update uses",
        "measured at the update, so after clipping: `pre_clip` is 0",
    ),
    "zero": Loop(
        "`ZeroRedundancyOptimizer`",
        "gradients and parameters on every rank; optimizer state of the rank's share",
        "update ratios, since the state of the other shares is elsewhere; `overlap_with_ddp` is refused",
    ),
    "deepspeed": Loop(
        "DeepSpeed, ZeRO stages 0 to 3, watched as `watch(engine, engine.optimizer)`",
        "the gradient norm over all ranks before clipping, outputs; parameters up to stage 2; gradients of layers at "
        "stage 0, after clipping",
        "what lies in flat partitions: `layer_gradient` and `update_ratio` are 0",
    ),
    "checkpointing": Loop("activation checkpointing, reentrant or not, selective", "each output once"),
    "by hand": Loop(
        "no optimizer: `watch(model)`, parameters changed by hand, also through `.data`",
        "a step wherever the parameters were changed after a backward; loss, gradient, parameters",
        "learning rate, update ratio, optimizer state: nobody tells; steps on copies of the parameters (`torch.func`) "
        "are not seen, and after 100 forwards `gradient` is 0",
    ),
    "own optimizers": Loop(
        "optimizers that are not torch's, wrappers that add to the update (Lookahead, SAM) or pass it on",
        "the outermost step, once, with the gradient that it uses",
        "update ratio, unless the wrapper only passes on",
    ),
    "torch.optim": Loop(
        "every class of `torch.optim`, plain, `foreach` and `fused`",
        "steps, gradients, first and second moments",
        "update ratio of all but SGD, Adam and AdamW",
    ),
    "within backward": Loop(
        "optimizers that step in the hooks of a backward and clear the gradient",
        "one step a backward, gradients taken before they are cleared",
        "update ratio; optimizer state and rate if the optimizers were not passed",
    ),
    "optimizers": Loop(
        "several optimizers (GAN), groups and parameters added later, parameters outside the model",
        "each `step()` is a step over its own parameters",
    ),
    "closure": Loop("LBFGS and other closures", "the gradient of the last evaluation"),
    "parameters": Loop(
        "frozen, unused, tied, zero-size, meta, sparse and complex parameters",
        "what exists; tied weights once, under the first name",
        "a gradient that is None is absent, not 0",
    ),
    "autograd": Loop(
        "`autograd.grad(create_graph=True)` in the forward, double backward, retained graphs, several losses, MAML, "
        "own `Function`s, hooks that change gradients",
        "one step, with the gradient that the update uses",
    ),
    "per sample": Loop(
        "gradients of single samples (`vmap` over `grad`), gradients written to `.grad`",
        "the gradient at the update",
        "activations, which have no value under a transform; `pre_clip` is 0",
    ),
    "rewritten": Loop(
        "gradients that the loop makes of several (PCGrad), adds noise to, or writes itself",
        "the gradient that the update uses, once a part of it was seen to grow after the backward",
        "what clipping did to it: `pre_clip` is 0",
    ),
    "replaced": Loop(
        "layers frozen, unfrozen, added; parameters of another dtype, replaced, materialised from meta",
        "from the next step on; the gradient at once",
    ),
    "modules": Loop(
        "parametrizations, `ParameterList`, buffers alone",
        "each parameter under the module that holds it",
        "activation of a module whose forward never runs",
    ),
    "calls": Loop(
        "one layer called hundreds of times in a step",
        "statistics of the first 16 calls; 256, then every 16th, are checked for values that are not finite",
    ),
    "threads": Loop(
        "loops in threads, forward in a pool, backward in another thread, Hogwild",
        "each model apart; no fault",
        "threads that update one model at once are not told apart",
    ),
    "outputs": Loop(
        "outputs in dicts, tuples, dataclasses, None; modules called several times a step",
        "all floating tensors of all calls together",
        "what lies in objects of other classes, in generators and functions: to look would be to compute",
    ),
    "dtypes": Loop(
        "bf16, fp16, fp8, int8, float64, autocast", "widened before squaring; headroom against the right maximum"
    ),
    "overflow": Loop("finite elements whose norm overflows float32", "the finite norm, and `overflow_imminent`"),
    "fsdp": Loop(
        "FSDP2 `fully_shard`, FSDP1 (views or flat parameters), HSDP",
        "this rank's share; squares over ranks add up to the norm of one process; layers of the bare model",
        "a layer with an empty shard on this rank; a share on a rank above 0 unless `layer_shares`",
    ),
    "tensor": Loop(
        "tensor parallelism, alone and with FSDP2",
        "the same; what is replicated counts once",
        "gradients that are not reduced when the update reads them (norms under `SequenceParallel` without FSDP2), and "
        'with them the norm of the model: `signal_available{signal="gradient"}` is 0',
    ),
    "evaluation": Loop("validation and generation between training steps", "training forwards alone"),
    "interrupted": Loop(
        "a backward that raises midway, `zero_grad` without a step, double backward", "the next step, once"
    ),
    "resume": Loop(
        "save and load: `monitor.state_dict()` in the checkpoint",
        "no warm-up and no alarm after a good restart; lost optimizer state and a higher learning rate are "
        "`resume_mismatch`",
        "state that an optimizer keeps elsewhere than in `optimizer.state` is lost unseen",
    ),
    "zoo": Loop(
        "over 150 architectures of transformers and of torch.nn: bare, checkpointed, compiled, data parallel, sharded",
        "names, outputs and gradients of all layers; losses, weights and warnings as alone",
    ),
    "compile": Loop(
        "`torch.compile` of the model, of its blocks, of the loss, of the optimizer's step, of the whole step",
        "as without it, at 0 graph breaks and 0 recompilations more; bit by bit the same losses",
        "with inductor, outputs of layers other than linear ones and convolutions: fused into what follows they would "
        "have to be made for us, and round otherwise; outputs in the branches of `torch.cond`, in the bodies of its "
        "loops and in transforms of `torch.func`, and of compiled blocks in reentrant checkpoints; with torch 2.6 all "
        "outputs in compiled code",
    ),
    "compile-late": Loop(
        "`watch()` after the first compiled step",
        "as above from the next step on, which compiles once more",
        "outputs, where compiling once more would raise; a warning says so, and `activation` is 0",
    ),
    "copies": Loop("copies, pickles and forks of a watched model", "nothing of ours travels or hangs"),
}


def table() -> str:
    """The rows as Markdown."""
    lines = ["| loop | right | absent, and why |", "|---|---|---|"]
    lines += [f"| {loop.title} | {loop.right} | {loop.absent} |" for loop in LOOPS.values()]
    return "\n".join(lines)


def splice(text: str) -> str:
    """The page with the table between its markers renewed."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"
