from .focal_dice import dice_loss as dice_loss
from .focal_dice import focal_loss as focal_loss
from .iou import actual_iou as actual_iou
from .iou import iou_regression as iou_regression
from .ohem import OHEM as OHEM
from .ohem import NoMining as NoMining
from .sam_loss import SamLoss as SamLoss
