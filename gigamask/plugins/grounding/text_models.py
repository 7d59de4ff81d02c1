"""Text models of transformers: loading, tokenisation, frozen weights and trained LoRA adapters.

Frozen weights are not part of a module's state: `parameters()` and checkpoints hold the adapters
only. Dropout is off, since its random numbers would not be reproducible.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from gigamask import rng
from gigamask.distributed.precision import HALF_DTYPES, choose_precision
from gigamask.errors import GigamaskError, check_range
from gigamask.plugins.grounding.text_features import TextFeatures, TextModel, Tokens
from gigamask.plugins.grounding.text_options import HuggingFaceOptions

DIGEST_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Suffixes of the files that determine what a model computes."""
TOWERS = {"siglip_text_model": "SiglipTextModel", "siglip2_text_model": "Siglip2TextModel"}
"""Text towers without an auto class in transformers, which were trained on texts padded to a fixed
length, without masking the padding.
"""
ATTENTION = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q", "v"),
    ("q_lin", "v_lin"),
    ("query_key_value",),
    ("qkv_proj",),
)
"""Names of query and value projections, for architectures without default LoRA targets in peft."""


class HuggingFaceTextModel(TextModel):
    """A text model of transformers with its tokenizer; `adapters` holds the trained parameters."""

    def __init__(
        self, base: Any, tokenizer: Any, options: HuggingFaceOptions, folder: Path, seed: int
    ) -> None:
        """Wrap a loaded model and add LoRA adapters if the options ask for them.

        Args:
            base: Frozen model of transformers.
            tokenizer: Its tokenizer.
            options: Settings of the model.
            folder: Folder of the model's files, for the digest.
            seed: Seed of the adapters' initial values.

        Raises:
            GigamaskError: The model has no `options.layer`, or does not support
                `options.max_tokens`.
        """
        super().__init__()
        self._frozen = (base,)  # in a tuple so that torch does not register it as a submodule
        self._tokenizer, self._options, self._folder = tokenizer, options, folder
        self._seed = seed
        self.dim, self.dtype, self.trainable = (
            base.config.hidden_size,
            base.dtype,
            options.trainable,
        )
        fixed = base.config.model_type in TOWERS
        self._fixed_length = base.config.max_position_embeddings if fixed else None
        self._check_options()
        self._lora_layers = add_lora(base, options, seed) if self.trainable else {}
        self.adapters = nn.ParameterDict(
            {name.replace(".", "/"): layer.weight for name, layer in self._lora_layers.items()}
        )

    @property
    def base(self) -> Any:
        """The model of transformers."""
        return self._frozen[0]

    @cached_property
    def digest(self) -> str:
        """Digest of the model's files, of the options, and of the seed if adapters are trained."""
        excluded = ("name", "revision", "sha256", "precision", "recompute")
        options = {
            name: value for name, value in vars(self._options).items() if name not in excluded
        }
        header = f"{options} {self.dtype} {self.trainable and self._seed}"
        digest = blake2b(header.encode(), digest_size=16)
        for path in sorted(self._folder.iterdir()):
            if path.suffix in DIGEST_SUFFIXES:
                with path.open("rb") as file:
                    digest.update(f"\0{path.name} {path.stat().st_size}\0".encode())
                    file_digest(file, lambda: digest)
        return digest.hexdigest()

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts, padded at the end; warn once if texts are truncated.

        Raises:
            GigamaskError: A text has no tokens, or a token that the model does not know.
        """
        limit = self._options.max_tokens
        ids = self._token_ids(texts, limit + 1)
        too_long = [text for text, row in zip(texts, ids, strict=True) if len(row) > limit]
        if too_long:
            ids = self._token_ids(texts, limit)
            self.warn_cut(too_long[0])
        self._check_ids(texts, ids)
        pad = self._tokenizer.pad_token_id or 0
        rows = [torch.tensor(row) for row in ids]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        lengths = torch.tensor([[len(row)] for row in ids])
        mask = torch.arange(input_ids.shape[1]) < lengths
        if self._fixed_length:
            padding = (0, self._fixed_length - input_ids.shape[1])
            input_ids = nn.functional.pad(input_ids, padding, value=pad)
            mask = nn.functional.pad(mask, padding, value=False)
        return Tokens(input_ids, mask)

    def cut_note(self, text: str) -> str:
        """Return how many tokens of a text are read; "" if all are."""
        limit = self._options.max_tokens
        is_cut = len(self._token_ids([text], limit + 1)[0]) > limit
        return f"only its first {limit} tokens are read" if is_cut else ""

    def forward(self, tokens: Tokens) -> TextFeatures:
        """Return the token features, computed in the model's dtype even under autocast."""
        tokens = tokens.to(self.base.device)
        layer = self._options.layer
        mask = None if self._fixed_length else tokens.attention_mask.long()
        with (
            torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()),
            torch.autocast(tokens.input_ids.device.type, enabled=False),
        ):
            output = self.base(
                input_ids=tokens.input_ids, attention_mask=mask, output_hidden_states=layer != -1
            )
        features = output.last_hidden_state if layer == -1 else output.hidden_states[layer]
        return TextFeatures(features.float(), tokens.attention_mask)

    def _token_ids(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        return self._tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]

    def _check_ids(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        vocabulary = self.base.get_input_embeddings().num_embeddings
        for text, row in zip(texts, ids, strict=True):
            prefix = f"text model {self._options.name!r}: the text {text[:60]!r}"
            if not row:
                raise GigamaskError(f"{prefix} has no tokens; remove it")
            if max(row) >= vocabulary:
                raise GigamaskError(
                    f"{prefix} has token {max(row)}, but the model has {vocabulary} embeddings; "
                    f"the tokenizer belongs to another model"
                )

    def _check_options(self) -> None:
        prefix = f"text model {self._options.name!r}"
        layer, limit = self._options.layer, self._options.max_tokens
        blocks = self.base.config.num_hidden_layers
        check_range(f"{prefix}: layer", layer, -1, blocks)
        least = self._tokenizer.num_special_tokens_to_add() + 1
        positions = getattr(self.base.config, "max_position_embeddings", math.inf)
        most = min(positions, self._tokenizer.model_max_length)
        check_range(f"{prefix}: max_tokens", limit, least, most)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "HuggingFaceTextModel":
        """Move the frozen weights too, and put the moved adapters back into their layers."""
        self.base._apply(fn)
        super()._apply(fn, recurse)
        for name, layer in self._lora_layers.items():
            layer.weight = self.adapters[name.replace(".", "/")]
        return self


def load(
    options: HuggingFaceOptions, folder: Path, device: torch.device, seed: int
) -> HuggingFaceTextModel:
    """Load a text model from a folder.

    Args:
        options: Settings of the model.
        folder: Folder with config, tokenizer and safetensors.
        device: Device of the model.
        seed: Seed of the adapters' initial values.

    Returns:
        The model, frozen except for its adapters.

    Raises:
        GigamaskError: The folder is not a complete text model, or `four_bit` is set without a GPU.
    """
    name = options.name
    if options.four_bit and device.type != "cuda":
        raise GigamaskError(
            f"text model {name!r}: four_bit needs a GPU, the device is {device.type}"
        )
    dtype = HALF_DTYPES.get(choose_precision(options.precision, device), torch.float32)
    from transformers import AutoTokenizer

    with loading_errors(name), quiet(), torch.random.fork_rng(devices=[]):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.truncation_side = "right"
        base, missing = load_weights(folder, device, dtype, options.four_bit)
        if options.recompute and options.trainable:
            enable_checkpointing(base)
    if missing:
        raise GigamaskError(
            f"text model {name!r}: {folder} lacks {len(missing)} tensors, first: {missing[0]}"
        )
    with torch.random.fork_rng(devices=[]):  # peft draws initial values that are overwritten
        return HuggingFaceTextModel(base, tokenizer, options, folder, seed).to(device)


def load_weights(
    folder: Path, device: torch.device, dtype: torch.dtype, four_bit: bool
) -> tuple[Any, list[str]]:
    """Load the text encoder of a model.

    Args:
        folder: Folder with config and safetensors.
        device: Device of 4-bit weights; others are loaded on the CPU.
        dtype: Type of the weights, or of the computation with 4-bit weights.
        four_bit: Whether linear layers are quantised to 4 bits.

    Returns:
        The frozen model, and the names of tensors that the folder lacks.
    """
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    config.use_cache = False
    quantization: dict[str, Any] = {}
    if four_bit:
        scheme = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        )
        quantization = {"quantization_config": scheme, "device_map": {"": device}}
    base, info = _auto_class(config).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **quantization,
    )
    unused = ("pooler.", "decoder.")
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    return _encoder_part(base).eval().requires_grad_(False), missing


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """Build the text encoder of a configuration on the meta device.

    Args:
        config: Configuration from transformers.
        dtype: Floating-point type of the weights.
    """
    auto_class = _auto_class(config)
    make = auto_class._from_config if config.model_type in TOWERS else auto_class.from_config
    with torch.device("meta"):
        return _encoder_part(make(config, dtype=dtype))


def _auto_class(config: Any) -> Any:
    """Return the class of transformers for the text encoder of a configuration."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    if config.model_type in TOWERS:
        return getattr(transformers, TOWERS[config.model_type])
    if config.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES:
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def _encoder_part(base: Any) -> Any:
    """Return the encoder of an encoder-decoder model, any other model unchanged."""
    has_decoder = base.config.is_encoder_decoder and hasattr(base, "decoder")
    return base.get_encoder() if has_decoder else base


def enable_checkpointing(base: Any) -> None:
    """Recompute every block in the backward pass.

    transformers does so in training mode only, so blocks are put in training mode with dropout 0.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for block in base.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.gradient_checkpointing = block.training = True
            attributes = vars(block)
            for name, value in list(attributes.items()):
                if "dropout" in name and isinstance(value, float):
                    attributes[name] = 0.0
            attributes["_gradient_checkpointing_func"] = function


def add_lora(base: Any, options: HuggingFaceOptions, seed: int) -> dict[str, nn.Linear]:
    """Add LoRA adapters to a model; B is zero, so its outputs do not change.

    Args:
        base: Model of transformers, changed in place.
        options: Rank, scale and targets of the adapters.
        seed: Seed of the initial values of A.

    Returns:
        The adapters' linear layers by name.

    Raises:
        GigamaskError: No linear layer is a target.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules=lora_targets(base, options),
        lora_dropout=0.0,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        inject_adapter_in_model(config, base)
    suffixes = (".lora_A.default", ".lora_B.default")
    layers = {
        name.removesuffix(".default"): module
        for name, module in base.named_modules()
        if name.endswith(suffixes)
    }
    for name, layer in layers.items():
        weight = torch.zeros(layer.weight.shape, device=layer.weight.device)
        if name.endswith(".lora_A"):
            bound = 1 / math.sqrt(layer.in_features)
            generator = rng.make_rng(seed, f"LoRA {name}")
            values = generator.uniform(-bound, bound, tuple(layer.weight.shape))
            weight = torch.from_numpy(values).to(weight)
        layer.weight = nn.Parameter(weight)
    return layers


def lora_targets(base: Any, options: HuggingFaceOptions) -> list[str]:
    """Find the linear layers that get adapters.

    Args:
        base: Model of transformers.
        options: Settings; without `lora_targets`, the architecture's usual layers are used.

    Returns:
        The full names of the layers.

    Raises:
        GigamaskError: No linear layer has one of the names.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    modules = base.named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]
    last = {name: name.rpartition(".")[2] for name in linear}
    model_type = base.config.model_type
    default = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, ())
    candidates = (options.lora_targets,) if options.lora_targets else (default, *ATTENTION)
    for names in candidates:
        if targets := [name for name in linear if last[name] in names]:
            return targets
    if options.lora_targets:
        problem = f"no linear layer is named {' or '.join(options.lora_targets)}"
    else:
        problem = f"no default LoRA targets for {model_type!r}; set lora_targets"
    known = ", ".join(sorted(set(last.values())))
    raise GigamaskError(f"text model {options.name!r}: {problem}; the linear layers are {known}")


@contextlib.contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Convert any error raised while loading model `name` to a one-line `GigamaskError`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise GigamaskError(
            f"text model {name!r}: cannot be loaded ({type(error).__name__}: {reason}); pass "
            f"another model or its complete folder"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the log and the progress bars of transformers."""
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
