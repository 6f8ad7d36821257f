"""Backends that quietly do something else are stopped by the run itself, with an error that says what they did."""

from __future__ import annotations

import pytest

from fake_distribution import write_distribution
from train_runs import Training, disagreements, train

SOURCE = '''
import contextlib
from fleettune_core.backends.ddp import DdpBackend
from fleettune_core.data.sharding import GlobalBatchSampler
from fleettune_core.hookspecs import hookimpl
from fleettune_core.types import WrapFacts, WrappedModel


class Forgetful(DdpBackend):
    """Wraps as asked, and then never lets DDP reduce."""

    @hookimpl
    def reduce_grads(self, context, model, sync):
        return model.no_sync()


class Summing(DdpBackend):
    """Adds the ranks' gradients up and does not divide."""

    @hookimpl
    def wrap_model(self, context, model, optimizer):
        import torch.distributed as dist

        def add(state, bucket):
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        wrapped = DdpBackend().wrap_model(context, model, optimizer)
        wrapped.model.register_comm_hook(None, add)
        return wrapped


class Losing(DdpBackend):
    """Drops what was accumulated before the last micro-batch of a step."""

    @hookimpl
    @contextlib.contextmanager
    def reduce_grads(self, context, model, sync):
        if sync:
            for parameter in model.parameters():
                parameter.grad = None
        with contextlib.nullcontext() if sync else model.no_sync():
            yield


class Altering(DdpBackend):
    """Touches the weights while it wraps them."""

    @hookimpl
    def wrap_model(self, context, model, optimizer):
        import torch

        with torch.no_grad():
            next(model.parameters()).flatten()[7] += 1e-6
        return DdpBackend().wrap_model(context, model, optimizer)


class Twice(DdpBackend):
    """Deals rows that were dealt already: each rank sees a part of its part."""

    @hookimpl
    def shard_data(self, context, dataset, shard):
        return Halved(dataset, shard)


class Halved(GlobalBatchSampler):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch[self.shard.index :: self.shard.count]


class Posing(DdpBackend):
    """Promises ZeRO-3 and gives DDP."""

    @hookimpl
    def expect_wrapped(self, run):
        return WrapFacts(wrapper="DistributedDataParallel", world_size=run.process.world_size, sharding="zero-3")


class Unwrapped(DdpBackend):
    """Says DDP and hands the plain model back."""

    @hookimpl
    def wrap_model(self, context, model, optimizer):
        facts = WrapFacts(wrapper="DistributedDataParallel", world_size=context.process.world_size)
        return WrappedModel(model=model, optimizer=optimizer, facts=facts)

    @hookimpl
    def reduce_grads(self, context, model, sync):
        return contextlib.nullcontext()


class Boasting(DdpBackend):
    """Says ZeRO-3 before and after, and gives DDP."""

    def facts(self, world):
        return WrapFacts(wrapper="DistributedDataParallel", world_size=world, sharding="zero-3")

    @hookimpl
    def expect_wrapped(self, run):
        return self.facts(run.process.world_size)

    @hookimpl
    def wrap_model(self, context, model, optimizer):
        wrapped = DdpBackend().wrap_model(context, model, optimizer)
        return WrappedModel(model=wrapped.model, optimizer=optimizer, facts=self.facts(context.process.world_size))


class Broken(DdpBackend):
    """Fails in a way that nobody foresaw."""

    @hookimpl
    def wrap_model(self, context, model, optimizer):
        raise ZeroDivisionError("by accident")
'''
UNCHECKED = """

def look_away():
    from fleettune_core.training import agreement, session

    class Blind:
        done, finding = True, None
        def __init__(self, *_, **__): ...
        def begin_micro_batch(self): ...
        def end_micro_batch(self, sync): ...

    session.ReductionProbe = Blind
    session.agreed_checksum = lambda *_, **__: None
    agreement.check_wrapped = lambda *_: None


for wrong in (Forgetful, Summing, Losing, Posing):
    @hookimpl
    def configure_training(self, run):
        look_away()
    wrong.configure_training = configure_training
"""
"""Appended to the source: the same backends, in a run whose checks are taken out."""

EXPECTED = {
    "forgetful": "rank 0: it is this rank's own gradient: nothing was reduced",
    "summing": "rank 0: it is the sum over 2 ranks",
    "losing": "rank 0: it is the last micro-batch alone: what was accumulated before it is lost",
    "altering": "its wrap_model has changed the model",
    "twice": "do not share out step 0",
    "posing": "sharding is none, not zero-3",
    "unwrapped": "the backend says wrapper DistributedDataParallel, and it is LlamaForCausalLM",
    "boasting": "the backend says sharding zero-3, and it is none",
    "broken": "its hook wrap_model raised ZeroDivisionError: by accident",
}


COMMON = [
    *("--global-batch", "8", "--micro-batch", "2", "--precision", "fp32", "--nproc-per-node", "2"),
    # The warm-up's first step has a learning rate of 0: nothing moves, and no weight can be seen to differ.
    *("--max-steps", "4", "--warmup-steps", "2", "--learning-rate", "1e-3"),
]


def trainings(folder, names, source, *data: str) -> dict[str, Training]:
    """One training with each of these backends."""
    write_distribution(
        folder / "site",
        "wrong-backends",
        {"fleettune.backends": {name: f"wrong_backends:{name.capitalize()}" for name in EXPECTED}},
        {"wrong_backends": source},
    )
    environment = {"PYTHONPATH": str(folder / "site"), "FT_CACHE_DIR": str(folder / "cache")}
    return {name: train(folder / name, *data, *COMMON, "--backend", name, environment=environment) for name in names}


@pytest.fixture(scope="module")
def runs(tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    data = ("--model", str(tiny_model), "--dataset", str(tiny_rows))
    return trainings(tmp_path_factory.mktemp("wrong-backends"), EXPECTED, SOURCE, *data)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_wrong_backend_ends_the_run_and_is_named(runs, name):
    run = runs[name]
    assert run.exit_code == 3, run.stderr
    assert EXPECTED[name] in " ".join(run.stderr.split())
    assert not (run.folder / "model").exists()
    assert run.report["status"] == "failed"


def test_it_trains_no_step_before_it_is_found(runs):
    for name in EXPECTED:
        assert not (runs[name].folder / "metrics.jsonl").exists() or not runs[name].steps, name


SHOWS_IN = {"forgetful": "losses", "summing": "gradient norms", "losing": "losses", "posing": "what ran"}
"""Where the same-numbers class sees each of them."""


@pytest.fixture(scope="module")
def unchecked(tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    data = ("--model", str(tiny_model), "--dataset", str(tiny_rows))
    folder = tmp_path_factory.mktemp("unchecked")
    return trainings(folder, [*SHOWS_IN, "ddp"], SOURCE + UNCHECKED, *data)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHOWS_IN))
def test_where_the_run_does_not_check_the_numbers_show_it(unchecked, name):
    sharding = "zero-3" if name == "posing" else "none"
    assert unchecked[name].exit_code == 0, unchecked[name].stderr
    right = disagreements(
        unchecked["ddp"], unchecked["ddp"], wrapper="DistributedDataParallel", sharding="none", ranks=2
    )
    wrong = disagreements(
        unchecked["ddp"], unchecked[name], wrapper="DistributedDataParallel", sharding=sharding, ranks=2
    )
    assert right == set()
    assert SHOWS_IN[name] in wrong
