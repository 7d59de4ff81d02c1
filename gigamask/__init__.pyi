import typing

from . import data as data
from . import evaluation as evaluation
from . import inference as inference
from . import interfaces as interfaces
from . import losses as losses
from . import masks as masks
from . import models as models
from . import prompts as prompts
from . import recipes as recipes
from . import samplers as samplers
from . import training as training
from . import types as types
from .errors import GigamaskError as GigamaskError
from .inference.automatic_mask_generator import (
    SamAutomaticMaskGenerator as SamAutomaticMaskGenerator,
)
from .inference.predictor import SamPredictor as SamPredictor
from .models.build_sam import build_sam as build_sam
from .models.build_sam import build_sam_vit_b as build_sam_vit_b
from .models.build_sam import build_sam_vit_h as build_sam_vit_h
from .models.build_sam import build_sam_vit_l as build_sam_vit_l
from .models.build_sam import sam_model_registry as sam_model_registry
from .models.configs import SamConfig as SamConfig
from .models.sam.sam import Sam as Sam
from .workflows.data_loader import DataLoader as DataLoader
from .workflows.evaluate import evaluate as evaluate
from .workflows.evaluate import load_model as load_model
from .workflows.evaluate import save_model as save_model
from .workflows.open_data import open_index as open_index
from .workflows.plan import plan as plan
from .workflows.segment import segment as segment
from .workflows.train import Run as Run
from .workflows.train import pretrain as pretrain
from .workflows.train import train as train

__version__: str
benchmark: typing.Callable[..., dict[str, typing.Any]]
distill: typing.Callable[..., Run]
extract: typing.Callable[..., dict[str, typing.Any]]
