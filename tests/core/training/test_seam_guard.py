"""Fails in a plain sentence when transformers, Accelerate or TRL move what the seam stands on."""

from __future__ import annotations

import inspect

import accelerate
import pytest
import transformers
import trl

from fleettune_core.training import seam

CLASSES = {"transformers.Trainer": transformers.Trainer, "accelerate.Accelerator": accelerate.Accelerator}


@pytest.mark.parametrize(
    ("owner", "method"), [(owner, name) for owner, names in seam.UPSTREAM.items() for name in names]
)
def test_upstream_still_has_the_methods_that_the_seam_overrides(owner, method):
    assert callable(getattr(CLASSES[owner], method, None)), (
        f"{owner} no longer has {method}(): training/seam.py overrides or calls it and must be changed"
    )


def test_trainer_still_builds_its_accelerator_inside_create_accelerator_and_postprocess():
    source = inspect.getsource(transformers.Trainer.create_accelerator_and_postprocess)
    assert "self.accelerator = Accelerator(" in source, (
        "Trainer no longer assigns self.accelerator there: HookedTrainer cannot adopt it after super()"
    )


def test_trainer_still_prepares_model_and_optimizer_together():
    source = inspect.getsource(transformers.Trainer._prepare_for_training)
    assert "self.accelerator.prepare(self.model, self.optimizer)" in source, (
        "Trainer no longer prepares model and optimizer in one call: wrap_model would not get both"
    )


def test_trainer_still_counts_gpus_in_a_place_that_build_overrides():
    assert "self.args.n_gpu > 1" in inspect.getsource(transformers.Trainer._wrap_model), (
        "Trainer no longer asks args.n_gpu whether to use nn.DataParallel: one process could spread over several GPUs"
    )
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
    arguments._n_gpu = 7
    assert arguments.n_gpu == 7, "TrainingArguments no longer keeps its count in _n_gpu: build.make_trainer sets it"


def test_trainer_still_logs_a_step_before_it_evaluates_or_saves():
    source = inspect.getsource(transformers.Trainer._maybe_log_save_evaluate)
    assert source.index("self.log(") < source.index("self._evaluate("), (
        "Trainer no longer logs a step first: checkpoints would be saved before the step was judged"
    )


def test_trainer_still_says_before_a_micro_batch_whether_it_is_the_last():
    source = inspect.getsource(transformers.Trainer._run_epoch)
    assert source.index("_set_sync_gradients(do_sync_step)") < source.index("self.training_step("), (
        "gradient_state.sync_gradients is no longer set before training_step: the gate would open at the wrong time"
    )


def test_prepare_model_in_evaluation_mode_still_applies_autocast_and_does_not_wrap():
    source = inspect.getsource(accelerate.Accelerator.prepare_model)
    assert "if self.native_amp:" in source, "Accelerator.prepare_model no longer applies autocast"
    assert "if not evaluation_mode" in source, "Accelerator.prepare_model(evaluation_mode=True) would wrap the model"


def test_accelerated_optimizer_still_can_leave_the_state_dict_alone():
    parameters = inspect.signature(accelerate.optimizer.AcceleratedOptimizer).parameters
    assert {"optimizer", "device_placement", "scaler"} <= set(parameters), (
        "AcceleratedOptimizer no longer takes device_placement and scaler"
    )


def test_sft_trainer_still_takes_prepared_rows_and_a_peft_config():
    parameters = inspect.signature(trl.SFTTrainer).parameters
    assert {"model", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config"} <= set(parameters)
    assert "skip_prepare_dataset" in inspect.getsource(trl.SFTTrainer), (
        "SFTTrainer no longer has dataset_kwargs['skip_prepare_dataset']: it would tokenise again"
    )


def test_an_adopted_accelerator_shares_the_state_of_the_one_that_trainer_built():
    original = accelerate.Accelerator(cpu=True)
    adopted = seam.HookedAccelerator.adopt(original, binding=None)
    original.marker = "set on the original"
    assert adopted.marker == "set on the original"
    assert isinstance(adopted, accelerate.Accelerator)
