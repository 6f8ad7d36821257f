"""Bytes per rank at the peak of a step, by part. Every rank holds the whole model unless the backend divides it.

Weights, gradients and optimizer state are counted. Activations follow the method of Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4): list what each layer
keeps for its backward. Their list is GPT-3's in 16 bits with stored attention matrices; the one below is what
transformers' eager layers keep today: RMS norm written out in PyTorch (its input, and its normalised value where its
scale is trained), fused attention (queries, keys, values and output, no attention matrix), a gated MLP. It was checked
against the bytes that `torch.autograd.graph.saved_tensors_hooks` reports (tests/core/plan), and the whole against the
live bytes of real trainings (benchmarks/memory.py).

A step has two moments at which it may need most. When the last micro-batch's loss is there: all activations and the
logits, beside the gradients of the micro-batches before. And in the optimizer's step: its temporaries. The parts are
those of the first moment; where the second needs more, the difference is the optimizer's.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fleettune_core.models.shape import LinearModule, ModelShape, linear_modules, num_parameters, root_parameters
from fleettune_core.plan.model import MemoryEstimate
from fleettune_core.types import BatchPlan, MemoryDivision

FP32 = 4
HALF = 2

OPTIMIZER_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "adamw_torch": 8,
        "adamw_torch_fused": 8,
        "adamw_apex_fused": 8,
        "adamw_anyprecision": 8,
        "stable_adamw": 8,
        "schedule_free_adamw": 8,
        "paged_adamw": 8,
        "paged_adamw_32bit": 8,
        "adamw_bnb_8bit": 2,
        "adamw_8bit": 2,
        "paged_adamw_8bit": 2,
        "adamw_torch_8bit": 2,
        "adamw_torch_4bit": 1,
        "ademamix": 12,
        "ademamix_8bit": 3,
        "lion": 4,
        "lion_32bit": 4,
        "paged_lion": 4,
        "lion_8bit": 1,
        "paged_lion_8bit": 1,
        "adagrad": 4,
        "rmsprop": 4,
        "rmsprop_bnb": 4,
        "rmsprop_bnb_8bit": 1,
        "sgd": 0,
        "adafactor": 0,
        "lomo": 0,
        "adalomo": 0,
    }
)
"""Bytes of state per trained weight, by transformers' name. AdamW: two moments in fp32. Adafactor keeps one number per
row and column, which is next to nothing."""

_LOGIT_BYTES = 3 * FP32
"""Per logit at the peak of the loss, whatever the precision: itself, its log-probability and its gradient, in fp32
(12.0 to 12.1 bytes measured with torch 2.13 on CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What decides how many bytes a layer keeps."""

    lora: bool
    compute: int
    """Bytes of a number in matrix multiplications."""
    residual: int
    """Bytes of a number in the residual stream."""
    autocast: bool
    """fp32 weights, cast at every use; otherwise computing in the weights' own precision."""
    targets: frozenset[str]
    """Linear layers that keep their input: all of them, or those with an adapter."""


def estimate(
    shape: ModelShape,
    *,
    batch: BatchPlan,
    max_length: int,
    precision: str,
    lora: bool = False,
    lora_r: int = 16,
    lora_target: str | None = None,
    gradient_checkpointing: bool = False,
    attn: str | None = None,
    optimizer: str = "adamw_torch",
    division: MemoryDivision | None = None,
) -> MemoryEstimate:
    """Bytes per rank for a run on `batch.ranks` ranks, for rows of `max_length` tokens.

    `precision`: `fp32`, `bf16` or `fp16`. `lora_target`: None, `all-linear`, or names with commas. `attn`: as
    transformers names it; only `eager` keeps the attention matrices.
    `division`: what the backend divides over the ranks and keeps besides (its hook `divide_memory`); None where it does
    neither. It is an upper figure: every row is taken to be `max_length` long and supervised throughout.
    """
    assert precision in {"fp32", "bf16", "fp16"}, precision
    modules = linear_modules(shape)
    parameters = num_parameters(shape)
    adapted = _adapted(modules, shape, lora_target) if lora else modules
    frozen_half = lora and precision == "bf16"
    adapter = _adapter_parameters(adapted, shape, lora_r) if lora else 0
    trainable = adapter if lora else parameters
    run = _Run(
        lora=lora,
        compute=FP32 if precision == "fp32" else HALF,
        residual=HALF if frozen_half else FP32,
        autocast=precision != "fp32" and not frozen_half,
        targets=frozenset(module.name for module in adapted),
    )

    shares = division or MemoryDivision()
    gathered_in_half = run.autocast and shares.gathered_in_half
    if gathered_in_half:
        # The embedding's output is in 16 bits then, and all that follows; autocast finds nothing to cast.
        run = replace(run, residual=HALF, autocast=False)
    tokens = batch.micro_batch * max_length
    table = 0 if lora else shape.vocab * shape.hidden
    # When the logits' gradient has become the head's, of three numbers per logit one is left.
    logits = max(tokens * shape.vocab * _LOGIT_BYTES, (tokens * shape.vocab + table) * FP32)
    layer = _layer_bytes(shape, modules, run, max_length, lora_r, attn) * tokens
    if gradient_checkpointing:
        # A layer is recomputed when the logits are gone: it counts as far as it is larger than they were.
        activations = shape.layers * shape.hidden * run.residual * tokens + max(0, layer - logits)
    else:
        activations = shape.layers * layer
    activations += 3 * shape.hidden * FP32 * tokens  # the last norm
    if run.autocast:
        activations += HALF * shape.layers * _linear_weights(shape, modules)
    if shape.tied_embeddings:
        # At the end of the backward the table's gradients as the head's and as the embedding's lie beside their sum.
        activations = max(activations, table * (2 * FP32 + run.compute) - logits)

    whole = _Whole(
        weights=parameters * (HALF if frozen_half else FP32) + adapter * FP32,
        trained=trainable * FP32,
        moments=trainable * OPTIMIZER_BYTES.get(optimizer, OPTIMIZER_BYTES["adamw_torch"]),
        root_share=root_parameters(shape) / max(1, parameters),
        layers=max(1, shape.layers),
        parameters=parameters + adapter,
    )
    copies = shares.gradient_copies if batch.accumulation > 1 else 1
    resting = 0 if shares.weights_offloaded else -(-whole.weights // shares.weights)
    gathered = _gathered(whole, shares) // (2 if gathered_in_half else 1)
    gradients = _gradients(whole, shares, batch, copies, logits)
    state = _state(whole, shares)
    surplus = max(0, _stepping(whole, shares) - gathered - gradients - activations - logits)
    return MemoryEstimate(
        weights=resting + gathered,
        gradients=gradients,
        optimizer=state + surplus,
        activations=activations,
        logits=logits,
        parameters=parameters + adapter,
        trainable=trainable,
        assumptions=(
            *_assumptions(
                shape, batch, max_length, run, gradient_checkpointing, attn, optimizer, copies, frozen_half, shares
            ),
            *(
                ["the optimizer's step needs more than the backward: its temporaries count as its state"]
                * bool(surplus)
            ),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Bytes of what is divided, and what its parts are."""

    weights: int
    trained: int
    """The trained weights in fp32; their gradients are as large."""
    moments: int
    root_share: float
    """Part of the weights that is in no layer."""
    layers: int
    parameters: int


def _gathered(whole: _Whole, shares: MemoryDivision) -> int:
    """Whole weights beside a rank's shards."""
    if shares.gathered_elements >= whole.parameters:
        return whole.weights
    root = int(whole.weights * whole.root_share)
    layers = shares.gathered_layers * ((whole.weights - root) // whole.layers) + shares.gathered_root * root
    return max(layers, whole.weights * shares.gathered_elements // whole.parameters)


def _gradients(whole: _Whole, shares: MemoryDivision, batch: BatchPlan, copies: int, logits: int) -> int:
    """Gradients and the buffers in which they are reduced."""
    bucket = _bucket(whole, shares)
    if shares.bucket_lives == "backward" or (shares.bucket_lives == "step" and batch.accumulation == 1):
        bucket = max(0, bucket - logits)  # the logits are gone when it is made
    if shares.weights_offloaded or shares.gradients_offloaded:
        return bucket
    parts = 1 if shares.gradients_whole_between and batch.accumulation > 1 else shares.gradients
    return copies * -(-whole.trained // parts) + bucket


def _bucket(whole: _Whole, shares: MemoryDivision) -> int:
    """The buffer in which gradients are reduced."""
    bucket = shares.bucket_elements * FP32
    return bucket if shares.bucket_fixed else min(bucket, whole.trained)


def _stepping(whole: _Whole, shares: MemoryDivision) -> int:
    """What the optimizer's step needs besides weights and state: gradients and temporaries. Nothing is gathered then,
    and no activation is left."""
    held = _bucket(whole, shares) if shares.bucket_lives == "run" else 0
    if not (shares.weights_offloaded or shares.gradients_offloaded):
        held += -(-whole.trained // shares.gradients)
    temporary = 0 if shares.optimizer_offloaded else shares.step_copies * -(-whole.trained // shares.optimizer)
    return held + temporary


def _state(whole: _Whole, shares: MemoryDivision) -> int:
    """The optimizer's moments, and the copies of the weights on which it works."""
    if shares.optimizer_offloaded:
        return 0
    return -(-(whole.moments + shares.master_copies * whole.trained) // shares.optimizer)


def lora_parameters(shape: ModelShape, *, r: int, target: str | None) -> int:
    """Weights of a LoRA adapter: r × (inputs + outputs) for every adapted layer (Hu et al. 2021, arXiv:2106.09685)."""
    return _adapter_parameters(_adapted(linear_modules(shape), shape, target), shape, r)


def _adapted(modules: tuple[LinearModule, ...], shape: ModelShape, target: str | None) -> tuple[LinearModule, ...]:
    """The linear layers that get an adapter; `lm_head` only when it is named."""
    if target is None or target == "all-linear":
        return modules
    names = {name.strip() for name in target.split(",")}
    head = LinearModule(name="lm_head", inputs=shape.hidden, outputs=shape.vocab, bias=False)
    return tuple(module for module in (*modules, head) if module.name in names)


def _adapter_parameters(adapted: tuple[LinearModule, ...], shape: ModelShape, r: int) -> int:
    return sum(
        r * (module.inputs + module.outputs) * (1 if module.name == "lm_head" else shape.layers) for module in adapted
    )


def _linear_weights(shape: ModelShape, modules: tuple[LinearModule, ...]) -> int:
    """Matrix elements of one layer, experts included."""
    experts = 3 * shape.num_experts * shape.hidden * shape.intermediate
    return sum(module.inputs * module.outputs for module in modules) + experts


def _layer_bytes(
    shape: ModelShape, modules: tuple[LinearModule, ...], run: _Run, max_length: int, lora_r: int, attn: str | None
) -> int:
    """Bytes that one layer keeps for its backward, per token."""
    family = shape.family
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    kept = 0

    # Norms: the input (RMS norm works in fp32 whatever the precision), and what a trained scale is multiplied with.
    rms = family.norm == "rms"
    norm_input = FP32 if rms else run.residual
    kept += family.norms_per_layer * hidden * (norm_input + (run.residual if rms and not run.lora else 0))

    # Inputs of linear layers that are trained or adapted. Layers that read one tensor share it where nothing is cast.
    # Under autocast each casts its own copy; an fp32 adapter on a bf16 layer casts its own copy to fp32.
    share = run.compute == FP32 or not (run.autocast or run.lora)
    cast = FP32 if run.lora and not run.autocast else run.compute
    inside = [module for module in modules if module.name in run.targets]
    readers = [module for module in inside if module.inputs == hidden and module.name in (*family.qkv, *family.mlp_in)]
    if share:
        kept += hidden * run.compute * len({module.name in family.qkv for module in readers})
    else:
        kept += hidden * cast * len(readers)
    mlp_width = shape.intermediate * max(1, shape.experts_per_token)
    if family.mlp_out in run.targets or (shape.num_experts and not run.lora):
        kept += mlp_width * cast
    if family.attention_out in run.targets and run.lora and not share and not run.autocast:
        kept += queries * cast

    # Attention: queries, keys, values and output. Keys and values are repeated to the number of heads where a row is
    # padded, and the padding mask is kept as numbers.
    kept += 4 * queries * run.compute + shape.heads * FP32
    if attn == "eager":
        # The softmax is taken in fp32; in lower precision its result is cast and kept a second time.
        kept += shape.heads * max_length * (FP32 if run.compute == FP32 else FP32 + HALF)
    elif attn is None or attn == "sdpa":
        kept += max_length * run.compute

    # MLP: gate, its activation, and up; or the one layer before the activation, of which GPT-2's keeps its steps.
    kept += mlp_width * run.compute * ((3 if shape.gated_mlp else 1) + (3 if family.eager_activation else 0))

    if run.lora:
        kept += lora_r * len(inside) * (run.compute if run.autocast else FP32)
    return kept


def _assumptions(
    shape: ModelShape,
    batch: BatchPlan,
    max_length: int,
    run: _Run,
    gradient_checkpointing: bool,
    attn: str | None,
    optimizer: str,
    copies: int,
    frozen_half: bool,
    shares: MemoryDivision,
) -> list[str]:
    said = [f"{batch.micro_batch} rows of {max_length} tokens, all of them supervised"]
    if shares.note:
        said.append(shares.note)
    if frozen_half:
        said.append("frozen weights in bf16, adapter in fp32")
    elif run.autocast:
        said.append("weights in fp32; their 16-bit copies of a step are counted with the activations")
    else:
        said.append("weights in fp32")
    said.append(
        "activations of one layer or the logits, whichever is larger, and the input of each (gradient checkpointing)"
        if gradient_checkpointing
        else "activations of all layers (no gradient checkpointing)"
    )
    if batch.accumulation == 1:
        said.append("all gradients beside all activations, though without accumulation the ones come as the others go")
    if attn == "eager":
        said.append("attention matrices are kept (attn_implementation eager)")
    if copies == 2:
        said.append("gradients twice: once in the buckets that are reduced")
    if shares.gradients_whole_between and batch.accumulation > 1:
        said.append("gradients whole until the last micro-batch of a step divides them")
    if optimizer not in OPTIMIZER_BYTES:
        said.append(f"optimizer {optimizer} is counted like AdamW")
    if not shape.known:
        said.append(f"layers of {shape.model_type or 'an unnamed type'} are counted like Llama's")
    said.append(
        "without the interpreter and its libraries (about 0.5 GB), and without what a fragmented heap holds back"
        " (on a CPU up to half of the activations)"
    )
    return said
