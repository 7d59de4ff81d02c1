"""What the model is asked: clicks, boxes, the schedules that choose among them, and the rounds that play a schedule against a model.

Not here: the prompt encoder (`model.prompt_encoder`), how wrong an answer is (`losses`), which numbers are drawn (`data.dataset`).
"""
