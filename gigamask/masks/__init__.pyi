from .rle import RLEMasks as RLEMasks
from .transforms import ImageTransform as ImageTransform
