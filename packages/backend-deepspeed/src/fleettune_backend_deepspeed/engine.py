"""The DeepSpeed engine: made, driven, and asked for the gradient norm of the step that it belongs to. Worker side."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from fleettune_backend_deepspeed.operations import build_async_io
from fleettune_backend_deepspeed.options import SHARED_MEMORY_OP, uses_nvme
from fleettune_core.backend_kit.process_group import ensure_process_group
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import DeviceKind, TrainingRun, WrapFacts, WrappedModel


def prepare_libraries(run: TrainingRun) -> None:
    """Import DeepSpeed for this run's device, over the process group that is already there.

    Raises FtError where what it needs is missing.
    """
    if run.device_kind is DeviceKind.CPU:
        # Read once, on import; without it DeepSpeed looks for devices by itself.
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise FtError(
            f"the backend deepspeed cannot import DeepSpeed: {error}",
            hint="pip install fleettune-backend-deepspeed, where the ranks run",
            exit_code=ExitCode.PLUGIN,
        ) from error

    # DeepSpeed calls torch's collectives by names that will go; torch says so at every step.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    if run.device_kind is DeviceKind.CPU:
        # On a CPU, DeepSpeed compiles a shared-memory operation for minutes when communication starts. Only its
        # inference_all_reduce uses that; training goes through gloo either way.
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    if uses_nvme(run.options):
        build_async_io(run.announce)
    ensure_process_group(run.device_kind)
    # transformers reads it to place the shards of a model that it loads, without looking for the process group.
    os.environ.setdefault("LOCAL_RANK", str(run.process.local_rank))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def sharded_creation(run: TrainingRun, config: dict[str, Any]) -> Any:
    """transformers' switch for creating a model in shards; it is on while the returned object lives."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    creation = dict(config)
    if run.config.model.lora and run.precision == "bf16":
        # A frozen base is created in bf16; the engine itself has no precision section, so that the adapter stays fp32.
        creation["bf16"] = {"enabled": True}
    return HfDeepSpeedConfig(creation)


def wrap(model: Any, optimizer: Any, config: dict[str, Any]) -> WrappedModel:
    """`deepspeed.initialize` around model and optimizer."""
    import deepspeed

    if isinstance(model, deepspeed.DeepSpeedEngine):
        return _wrapped(model)
    if config["zero_optimization"]["stage"] == 0:
        # Clipped here: the engine does not tell the norm at stage 0.
        config = {**config, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False, model_parameters=None
    )
    return _wrapped(engine)


def _wrapped(engine: Any) -> WrappedModel:
    stage = engine.zero_optimization_stage()
    driver = EngineOptimizer(engine)
    facts = WrapFacts(
        wrapper=type(engine).__name__,
        world_size=engine.dp_world_size,
        sharding=f"zero-{stage}" if stage else "none",
    )
    return WrappedModel(
        model=engine,
        optimizer=driver,
        facts=facts,
        backward=driver.backward,
        clip_grad_norm=driver.step_and_norm,
        # At stage 0 gradients stay where torch puts them.
        read_gradient=_read_gradient if stage else None,
    )


def _read_gradient(parameter: Any) -> torch.Tensor | None:
    """The whole gradient of a weight, put together from the ranks' shares (collective)."""
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


class EngineOptimizer(torch.optim.Optimizer):
    """The engine, where Trainer expects an optimizer.

    The engine clips and steps in one call and tells the norm afterwards. Trainer asks for the norm first and steps
    then: so the step is taken when the norm is asked for, and `step` finds it done.
    """

    def __init__(self, engine: Any) -> None:
        # Not super().__init__: the groups are the engine's own, and there is no second state.
        self.engine = engine
        self.defaults: dict[str, Any] = {}
        self._stepped = False

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.engine.optimizer.state

    def backward(self, loss: Any) -> None:
        """One micro-batch's backward. The loss is normalised already: the engine must not divide it again."""
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # counts the micro-batch; nothing is updated

    def step_and_norm(self, max_norm: float) -> Any:
        """Clip, step, and return the norm before clipping. From stage 1 on the engine clips, with the plan's norm."""
        if not self.engine.zero_optimization():
            return torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), max_norm)
        self.step()
        self._stepped = True
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(float(norm) if norm is not None else float("nan"))

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - as torch declares it
        """Take the step unless it has been taken when the norm was asked for."""
        if self._stepped:
            self._stepped = False
            return
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine does it after its step."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the state is saved by name, in the portable form."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `state_dict`."""
