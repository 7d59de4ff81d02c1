from .mixed import MixedPrompts as MixedPrompts
from .rounds import run_rounds as run_rounds
from .schedule import BoxPrompt as BoxPrompt
from .schedule import CenterClicks as CenterClicks
from .schedule import InteractiveSchedule as InteractiveSchedule
from .two_sided import TwoSidedCorrection as TwoSidedCorrection
