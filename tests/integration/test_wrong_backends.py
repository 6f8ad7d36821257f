"""Backends that quietly do something else are stopped by the run itself, with an error that says what they did."""

from __future__ import annotations

import pytest

from fake_distribution import write_distribution
from train_runs import Training, train

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
EXPECTED = {
    "forgetful": "weights differ after optimizer step 2",
    "twice": "do not share out step 0",
    "posing": "sharding is none, not zero-3",
    "unwrapped": "the backend says wrapper DistributedDataParallel, and it is LlamaForCausalLM",
    "boasting": "the backend says sharding zero-3, and it is none",
    "broken": "its hook wrap_model raised ZeroDivisionError: by accident",
}


@pytest.fixture(scope="module")
def runs(tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    folder = tmp_path_factory.mktemp("wrong-backends")
    write_distribution(
        folder / "site",
        "wrong-backends",
        {"fleettune.backends": {name: f"wrong_backends:{name.capitalize()}" for name in EXPECTED}},
        {"wrong_backends": SOURCE},
    )
    environment = {"PYTHONPATH": str(folder / "site"), "FT_CACHE_DIR": str(folder / "cache")}
    common = ["--model", str(tiny_model), "--dataset", str(tiny_rows), "--global-batch", "8", "--micro-batch", "2"]
    return {
        name: train(
            folder / name,
            *common,
            # The warm-up's first step has a learning rate of 0: nothing moves, and nothing can be seen to differ.
            *("--max-steps", "4", "--warmup-steps", "2", "--precision", "fp32", "--nproc-per-node", "2"),
            *("--backend", name),
            environment=environment,
        )
        for name in EXPECTED
    }


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_wrong_backend_ends_the_run_and_is_named(runs, name):
    run = runs[name]
    assert run.exit_code == 3, run.stderr
    assert EXPECTED[name] in " ".join(run.stderr.split())
    assert not (run.folder / "model").exists()
    assert run.report["status"] == "failed"


def test_it_trains_no_more_than_the_step_that_showed_it(runs):
    assert not (runs["posing"].folder / "metrics.jsonl").exists() or not runs["posing"].steps
    assert len(runs["forgetful"].steps) <= 2
