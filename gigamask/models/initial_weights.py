"""Initial weights of a SAM: a whole model's, a decoder's, or those of an MAE for its encoder."""

from gigamask.errors import GigamaskError
from gigamask.interfaces import ImageEncoder
from gigamask.models import state_dict
from gigamask.models.configs import DECODER_PREFIX, MAE_PREFIX, SamConfig, as_sam, part_name
from gigamask.models.convert import from_mae, plain_vit
from gigamask.models.families import suggest_recipe
from gigamask.models.model import Model
from gigamask.models.weight_files import State

DECODER = ("prompt_encoder.", "mask_decoder.")
CLASS_HEAD = "mask_decoder.class_head."


def load_init(model: Model, path: str) -> set[str]:
    """Load initial weights into a SAM.

    Args:
        model: The model.
        path: Path of the weights; `mae:PATH` of an MAE or EfficientSAM, for the image encoder; or
            `decoder:PATH` of a SAM, of which only prompt encoder and mask decoder are loaded,
            beside a pretrained encoder's own weights.

    Returns:
        Names of the tensors whose values come from the weights. An MAE has no relative positions:
        zeros, their initial values, reproduce it and count as its own.

    Raises:
        GigamaskError: The weights do not fit the model.
    """
    if path.startswith(DECODER_PREFIX):
        return _load_decoder(model, path)
    if path.startswith(MAE_PREFIX):
        return _load_encoder(model, path.removeprefix(MAE_PREFIX))
    weights, stated = state_dict.read_weights(path)
    if "cls_token" in weights:
        raise GigamaskError(
            f"{path}: holds an MAE; give {MAE_PREFIX}{path} to start the image encoder from it"
        )
    config = as_sam(stated, path)
    with suggest_recipe(weights):
        if config:
            _check_encoder(config.encoder, model.config.encoder, path)
        weights, loaded = _fit_class_head(model, weights, config, path)
        state_dict.load_weights(model, weights, path)
    # With relative positions, shapes determine the encoder's heads, but not these.
    unseen = {"decoder_num_heads": "attention heads in the mask decoder"}
    if any(".attn.rel_pos_" in name for name in weights):
        unseen |= {
            "window_size": "tokens along a window",
            "global_attn_indexes": "as global blocks",
        }
    for name, words in unseen.items():
        given, own = (getattr(each, name) for each in (config or model.config, model.config))
        if given != own:
            flag = name.replace("_", "-")
            text = " ".join(map(str, given)) if isinstance(given, tuple) else given
            raise GigamaskError(
                f"{path}: has {given} {words}, the model has {own}; use --model.{flag} {text}"
            )
    return loaded


def _load_encoder(model: Model, path: str) -> set[str]:
    """Load the image encoder of an MAE."""
    weights, stated = state_dict.read_weights(path)
    sizes, flag = plain_vit(model.config, path)
    if (heads := getattr(stated, "num_heads", sizes.num_heads)) != sizes.num_heads:
        raise GigamaskError(
            f"{path}: has {heads} attention heads, the model has {sizes.num_heads}; use "
            f"{flag}.num-heads {heads}"
        )
    own = model.state_dict()
    with suggest_recipe(weights):
        encoder = from_mae(weights, model.config, path)
        state_dict.load_weights(model, {**own, **encoder}, path)
    return set(encoder) | {name for name in own if ".attn.rel_pos_" in name}


def _load_decoder(model: Model, path: str) -> set[str]:
    """Load the prompt encoder and mask decoder of a SAM, and an encoder's pretrained weights."""
    weights, stated = state_dict.read_weights(path.removeprefix(DECODER_PREFIX))
    weights, loaded = _fit_class_head(model, weights, as_sam(stated, path), path)
    decoder = {name: value for name, value in weights.items() if name.startswith(DECODER)}
    if not decoder:
        raise GigamaskError(f"{path}: {DECODER_PREFIX} starts a SAM from the decoder of another")
    own = {
        name: value for name, value in model.state_dict().items() if not name.startswith(DECODER)
    }
    try:
        state_dict.load_weights(model, own | decoder, path)
    except GigamaskError as error:
        raise GigamaskError(
            f"{error}; a decoder needs --model.embedding-dim, --model.decoder and the other sizes "
            "as they were"
        ) from None
    model.load_pretrained()
    return loaded & set(decoder)


def _fit_class_head(
    model: Model, weights: State, config: SamConfig | None, path: str
) -> tuple[State, set[str]]:
    """Return weights with the model's initial head for classes unless they have the same classes.

    Args:
        model: The model.
        weights: The weights.
        config: Configuration that the weights state.
        path: Where they come from, for the error.

    Returns:
        The weights, and the names of those that are not the model's own.
    """
    own, stated = model.config.class_names, config.class_names if config else ()
    if stated == own:
        return weights, set(weights)
    if not own:
        raise GigamaskError(
            f"{path}: its masks have the classes {', '.join(stated)[:200]}; give --classes auto or "
            "names, the same ones to keep its head"
        )
    others = {name: value for name, value in weights.items() if not name.startswith(CLASS_HEAD)}
    head = {name: v for name, v in model.state_dict().items() if name.startswith(CLASS_HEAD)}
    return others | head, set(others)


def _check_encoder(stated: ImageEncoder, own: ImageEncoder, path: str) -> None:
    """Check that weights are for an image encoder of the same kind."""
    first, second = (part_name("encoder", type(each)) for each in (stated, own))
    if first and second and first != second:
        value = f":{getattr(stated, stated.argument)}" if stated.argument else ""
        raise GigamaskError(
            f"{path}: has the image encoder {first}, the model has {second}; choose a recipe with "
            f"that encoder (compact has starter's), or use --model.encoder {first}{value}"
        )
