from .focal_dice import dice_loss as dice_loss
from .focal_dice import focal_loss as focal_loss
from .iou import iou_prediction_loss as iou_prediction_loss
from .iou import mask_iou as mask_iou
from .ohem import OHEM as OHEM
from .ohem import NoMining as NoMining
from .sam_loss import SamLoss as SamLoss
