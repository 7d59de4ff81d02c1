from .focal_dice import dice as dice
from .focal_dice import focal as focal
from .iou import actual_iou as actual_iou
from .iou import iou_regression as iou_regression
from .ohem import OHEM as OHEM
from .ohem import NoMining as NoMining
from .sam_loss import SamLoss as SamLoss
