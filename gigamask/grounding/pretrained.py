"""A pretrained text model: a folder's files and options enter, a `TextModel` leaves, its weights frozen, with adapters beside them where asked for.

What is frozen is no part of the module's state: a checkpoint holds the adapters alone, and `parameters()` are what is trained. Weights never drop
anything out, since chance is named here (`draws`) and theirs would not be.

Not here: where the files are (`grounding.text`).
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from gigamask import draws
from gigamask.faults import Fault
from gigamask.grounding.words import TextModel, Tokens, Words
from gigamask.parallel.precision import HALVES, choose_precision

if TYPE_CHECKING:
    from gigamask.grounding.text import HuggingFace

READ = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""How the names of those files end that decide what a model computes."""
TOWERS = {"siglip_text_model": "SiglipTextModel", "siglip2_text_model": "Siglip2TextModel"}
"""Text towers that transformers has no automatic class for. They were trained on texts padded to one length, whose padding they read."""
ATTENTION = (("q_proj", "v_proj"), ("query", "value"), ("q", "v"), ("q_lin", "v_lin"), ("query_key_value",), ("qkv_proj",))
"""Names of queries and values, for architectures that peft has no choice for."""


class Pretrained(TextModel):
    """A model of transformers' and its tokeniser. `base` holds the frozen weights and, within, the parameters that `adapters` lists."""

    def __init__(self, base: Any, tokeniser: Any, encoder: "HuggingFace", folder: Path, seed: int) -> None:
        super().__init__()
        self._outside = (base,)  # in a tuple, where torch does not look for modules
        self._tokeniser, self._encoder, self._folder, self._seed, self._cut = tokeniser, encoder, folder, seed, False
        self.dim, self.dtype, self.learns = base.config.hidden_size, base.dtype, encoder.learns
        self._length = base.config.max_position_embeddings if base.config.model_type in TOWERS else None
        self._check()
        self._homes = adapt(base, encoder, seed) if self.learns else {}
        self.adapters = nn.ParameterDict({name.replace(".", "/"): home.weight for name, home in self._homes.items()})

    @property
    def base(self) -> Any:
        """The model of transformers'."""
        return self._outside[0]

    @cached_property
    def digest(self) -> str:
        """Names the files' content, the options, and where adapters start."""
        options = {name: value for name, value in vars(self._encoder).items() if name not in ("name", "precision", "recompute")}
        told = blake2b(f"{options} {self.dtype} {self.learns and self._seed}".encode(), digest_size=16)
        for path in sorted(self._folder.iterdir()):
            if path.suffix in READ:
                with path.open("rb") as file:
                    told.update(f"\0{path.name} {path.stat().st_size}\0".encode())
                    while block := file.read(1 << 22):
                        told.update(block)
        return told.hexdigest()

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Returns the texts' tokens, padded at the end whichever side the tokeniser would choose; warns once where some are cut."""
        limit = self._encoder.max_tokens
        found = self._pieces(texts, limit + 1)
        if long := [text for text, pieces in zip(texts, found, strict=True) if len(pieces) > limit]:
            found = self._pieces(texts, limit)
            if not self._cut:
                self._cut = True
                told = f"texts of more than {limit} tokens are cut, the first is {long[0][:60]!r}"
                warnings.warn(f"text model {self._encoder.name!r}: {told}", stacklevel=2)
        self._check_pieces(texts, found)
        pad = self._tokeniser.pad_token_id or 0
        ids = pad_sequence([torch.tensor(pieces) for pieces in found], batch_first=True, padding_value=pad)
        present = torch.arange(ids.shape[1]) < torch.tensor([[len(pieces)] for pieces in found])
        if self._length:
            ids, present = (nn.functional.pad(each, (0, self._length - each.shape[1]), value=fill) for each, fill in ((ids, pad), (present, False)))
        return Tokens(ids, present)

    def forward(self, tokens: Tokens) -> Words:
        """Returns the tokens' features, in the model's own precision whatever surrounds it."""
        tokens = tokens.to(self.base.device)
        layer, present = self._encoder.layer, None if self._length else tokens.present.long()
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()), torch.autocast(tokens.ids.device.type, enabled=False):
            found = self.base(input_ids=tokens.ids, attention_mask=present, output_hidden_states=layer != -1)
        features = found.last_hidden_state if layer == -1 else found.hidden_states[layer]
        return Words(features.float(), tokens.present)

    def _pieces(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        return self._tokeniser(list(texts), padding=False, truncation=True, max_length=limit, return_attention_mask=False)["input_ids"]

    def _check_pieces(self, texts: Sequence[str], found: Sequence[Sequence[int]]) -> None:
        """Raises `Fault` for a text without tokens, or with one that the model has no embedding of."""
        known = self.base.get_input_embeddings().num_embeddings
        for text, pieces in zip(texts, found, strict=True):
            about = f"text model {self._encoder.name!r}: the text {text[:60]!r}"
            if not pieces:
                raise Fault(f"{about} has no tokens; leave it out")
            if max(pieces) >= known:
                raise Fault(f"{about} has token {max(pieces)}, and the model knows {known}; its tokeniser is of another model")

    def _check(self) -> None:
        """Raises `Fault` where the model has no such layer, or no room for so many tokens."""
        name, layer, limit = self._encoder.name, self._encoder.layer, self._encoder.max_tokens
        blocks = self.base.config.num_hidden_layers
        if not -1 <= layer <= blocks:
            raise Fault(
                f"text model {name!r}: layer is {layer}, it has {blocks} blocks; give 0 for its embeddings, 1 to {blocks}, or -1 for the last"
            )
        least = self._tokeniser.num_special_tokens_to_add() + 1
        most = min(getattr(self.base.config, "max_position_embeddings", math.inf), self._tokeniser.model_max_length)
        if not least <= limit <= most:
            raise Fault(f"text model {name!r}: max_tokens is {limit}, it reads texts of {least} to {most}; give one of these")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pretrained":
        """Moves what is frozen as well; adapters stay what the model computes with."""
        self.base._apply(fn)
        super()._apply(fn, recurse)
        for name, home in self._homes.items():
            home.weight = self.adapters[name.replace(".", "/")]
        return self


def load(encoder: "HuggingFace", folder: Path, device: torch.device, seed: int) -> Pretrained:
    """Returns the model that lies in a folder; whatever transformers says against it becomes one line."""
    if encoder.four_bit and device.type != "cuda":
        raise Fault(f"text model {encoder.name!r}: four_bit needs a GPU, and it is built on the {device.type}; leave four_bit out")
    dtype = HALVES.get(choose_precision(encoder.precision, device), torch.float32)
    from transformers import AutoTokenizer

    with one_line(encoder), quiet(), torch.random.fork_rng(devices=[]):
        tokeniser: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokeniser.truncation_side = "right"
        base, missing = weights(folder, device, dtype, encoder.four_bit)
        if encoder.recompute and encoder.learns:
            recompute(base)
    if missing:
        raise Fault(f"text model {encoder.name!r}: {folder} has no weights for {len(missing)} of its tensors, the first is {missing[0]}")
    with torch.random.fork_rng(devices=[]):  # what peft draws is thrown away
        return Pretrained(base, tokeniser, encoder, folder, seed).to(device)


def weights(folder: Path, device: torch.device, dtype: torch.dtype, four_bit: bool) -> tuple[Any, list[str]]:
    """Returns the part of a folder's model that reads texts, frozen, and the names of tensors that the folder does not hold."""
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    config.use_cache = False
    given: dict[str, Any] = {"config": config, "dtype": dtype, "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    if four_bit:
        scheme = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4")
        given |= {"quantization_config": scheme, "device_map": {"": device}}
    base, told = kind(config).from_pretrained(folder, **given)
    base = base.get_encoder() if config.is_encoder_decoder and hasattr(base, "decoder") else base
    missing = sorted(name for name in told["missing_keys"] if not name.startswith(("pooler.", "decoder.")))
    return base.eval().requires_grad_(False), missing


def kind(config: Any) -> Any:
    """Returns the class of transformers' that reads texts by such a configuration."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    if config.model_type in TOWERS:
        return getattr(transformers, TOWERS[config.model_type])
    return transformers.AutoModelForTextEncoding if config.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES else transformers.AutoModel


def without_numbers(config: Any, dtype: torch.dtype) -> Any:
    """Returns the part of a model that reads texts, by its configuration alone."""
    known = kind(config)
    with torch.device("meta"):
        base = (known._from_config if config.model_type in TOWERS else known.from_config)(config, dtype=dtype)
    return base.get_encoder() if config.is_encoder_decoder and hasattr(base, "decoder") else base


def recompute(base: Any) -> None:
    """Lets every block of a model keep what enters it alone; transformers asks for training mode, in which no block may drop anything."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for block in base.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.gradient_checkpointing = block.training = True
            dropped = {name: 0.0 for name, value in vars(block).items() if "dropout" in name and isinstance(value, float)}
            vars(block).update(dropped, _gradient_checkpointing_func=partial(checkpoint, use_reentrant=False, preserve_rng_state=False))


def adapt(base: Any, encoder: "HuggingFace", seed: int) -> dict[str, nn.Linear]:
    """Puts adapters into a model, and returns their linear layers by name; those that B begins with are 0, so that the model is as it was."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=encoder.lora_rank, lora_alpha=encoder.lora_alpha, target_modules=targets(base, encoder), lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        inject_adapter_in_model(config, base)
    homes = {name.removesuffix(".default"): module for name, module in base.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))}
    for name, home in homes.items():
        start = torch.zeros(home.weight.shape, device=home.weight.device)
        if name.endswith(".lora_A"):
            bound = 1 / math.sqrt(home.in_features)
            drawn = draws.draw(seed, f"LoRA {name}").uniform(-bound, bound, tuple(home.weight.shape))
            start = torch.from_numpy(drawn).to(start)
        home.weight = nn.Parameter(start)
    return homes


def targets(base: Any, encoder: "HuggingFace") -> list[str]:
    """Returns the names of the linear layers that get adapters; raises `Fault` where none is called so."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    last = {name: name.rpartition(".")[2] for name in linear}
    usual = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(base.config.model_type, ())
    for wanted in (encoder.lora_targets,) if encoder.lora_targets else (usual, *ATTENTION):
        if found := [name for name in linear if last[name] in wanted]:
            return found
    wanted = f"none of its linear layers is called {' or '.join(encoder.lora_targets)}" if encoder.lora_targets else "lora_targets must be named"
    raise Fault(f"text model {encoder.name!r}: {wanted}; they are {', '.join(sorted(set(last.values())))}")


@contextlib.contextmanager
def one_line(encoder: "HuggingFace") -> Iterator[None]:
    """Turns what is said against a model's files, by whatever library, into one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise Fault(f"text model {encoder.name!r}: cannot be loaded ({type(error).__name__}: {reason}); give another, or its whole folder") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' bars and reports off the screen meanwhile; what is missing of a model is told otherwise."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
