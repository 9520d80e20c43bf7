# The names of `runner/__init__.py`, for type checkers.
from accel.run.loss_normalization import global_weight as global_weight
from accel.run.loss_normalization import normalize_loss as normalize_loss
from runner.data.batches import MicroBatch as MicroBatch
from runner.data.batches import Window as Window
from runner.data.datasets import Data as Data
from runner.inference.load import load as load
from runner.recipe.factory import register as register
from runner.training.run import Callback as Callback
from runner.training.step import Objective as Objective
from runner.training.step import Step as Step
from runner.training.step import SupervisedStep as SupervisedStep
from runner.training.step import clip_gradients as clip_gradients
from runner.training.step import keep_valid as keep_valid
from runner.training.step import optimizer_step as optimizer_step

__all__: list[str]
