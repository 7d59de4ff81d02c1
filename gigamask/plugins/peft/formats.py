"""The format of peft."""

from gigamask.export.formats import ExportFormat

PEFT = ExportFormat(
    "gigamask.plugins.peft.exporter:write_peft",
    ("weights", "base"),
    library="peft",
    loading="""```python
from peft import PeftModel
from transformers import SamModel

model = PeftModel.from_pretrained(SamModel.from_pretrained("{base}"), "{name}")
```
""",
    without_window="give --window or --percentiles again wherever the adapters are loaded",
)
