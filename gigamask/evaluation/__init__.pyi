from .boundary import boundary_f as boundary_f
from .boundary import boundary_iou as boundary_iou
from .click_evaluation import ClickEvaluation as ClickEvaluation
from .clicks import ClickProtocol as ClickProtocol
from .clicks import evaluate_clicks as evaluate_clicks
from .coco_ap import coco_metrics as coco_metrics
