"""Small, randomly initialised models of every architecture that transformers and timm ship.

    build("hf:llama")             -> Specimen(model, inputs)     LlamaForCausalLM, 2 layers, hidden size 64
    build("hf-base:bert")         -> the headless model
    build("timm:resnet")          -> the smallest entry point of timm's resnet family at a small image size

transformers: the default configuration of the architecture, every size that a table knows replaced by a
small one, also in nested configurations; inputs from the names in `forward`'s signature. Nothing is
downloaded. `NAMES` in `architectures.txt` lists the ones that build and run in eager.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tests import vision_ops  # noqa: F401 isort: skip

try:
    import timm  # noqa: E402
except ImportError:  # its models are left out
    timm = None
import transformers  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

LIST: Final = Path(__file__).with_name("architectures.txt")
TOKENS: Final = 16
MOST_PARAMETERS: Final = 30_000_000

SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "projection_dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "output_proj_dim", "encoder_hidden_size", "text_embed_dim", "d_embed"), 64),
    **dict.fromkeys(("true_hidden_size", "rnn_hidden_size", "attention_hidden_size", "attention_dim", "cross_attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim", "dim_feedforward"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size", "hidden_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks", "num_hidden_groups", "predictor_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "o_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "audio_vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "router_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "index_topk", "n_shared_experts"), 1),
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "sliding_window": 8, "attention_window": 8,
    "hidden_size_per_layer_input": 16, "altup_num_inputs": 2, "laurel_rank": 8, "conv_kernel": 4, "state_size": 8,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "time_step_rank": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_n_groups": 1, "mamba_d_ssm": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "lru_width": 64, "num_buckets": 8, "relative_attention_num_buckets": 8, "rotary_dim": 8, "type_vocab_size": 4,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "num_queries": 8, "num_latents": 8, "d_latents": 64, "first_k_dense_replace": 1, "mlp_dim": 96, "bottleneck_size": 16,
    "chunk_size": 8, "expand_size": 8, "num_codevectors_per_group": 8, "num_register_tokens": 2, "decoder_hidden_size": 64,
    "intra_bottleneck_size": 64, "spatial_shape": (4, 4), "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32),
    "mrope_section": (2, 3, 3), "query_pre_attn_scalar": 16, "backbone_feature_size": 64, "fpn_hidden_size": 32,
}
"""Field name of a configuration -> small value. Only fields the architecture has are used."""

PER_STAGE: Final[dict[str, int]] = {
    "hidden_sizes": 16, "embed_dims": 16, "neck_hidden_sizes": 16, "out_channels": 16, "stem_channels": 16, "depths": 0, "conv_dim": -32, "tdnn_dim": -32,
    "encoder_hidden_sizes": 16, "layer_depths": 0, "num_layers_per_stage": 0,
}
"""Lists with one value a stage: width of the first stage, doubling after; 0 means all ones; negative, all the same."""


@dataclass(frozen=True, slots=True)
class Specimen:
    model: torch.nn.Module
    inputs: dict[str, Any]


def names(library: str | None = None) -> list[str]:
    listed = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    known = {"hf"} if timm is None else {"hf", "timm"}
    return [name for name in listed if name.partition(":")[0] in (known if library is None else known & {library})]


def candidates() -> list[str]:
    """Everything to try: causal models with their head, the rest headless, one model of each timm family."""
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = [f"hf:{kind}" for kind in causal]
    found += [f"hf:{kind}" for kind in auto.MODEL_MAPPING_NAMES if kind not in causal]
    return found + [f"timm:{family}" for family in timm.list_modules()]


def build(name: str) -> Specimen:
    library, _, kind = name.partition(":")
    torch.manual_seed(0)
    specimen = {"hf": build_transformer, "timm": build_timm}[library](kind)
    count = sum(parameter.numel() for parameter in specimen.model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} M parameters: the size table does not know this architecture")
    return specimen


# -- transformers ----------------------------------------------------------------------------------


def shrink(config_class: type) -> Any:
    """The default configuration with every known size made small, nested configurations too."""
    default = config_class()
    values: dict[str, Any] = {}
    for field, old in default.to_dict().items():
        current = getattr(default, field, old)
        if isinstance(current, transformers.PretrainedConfig):
            values[field] = shrink(type(current))
        elif field in PER_STAGE and isinstance(old, list | tuple):
            start = PER_STAGE[field]
            values[field] = type(old)(-start if start < 0 else start * 2**stage or 1 for stage in range(len(old)))
        elif field in SMALL and old is not None and isinstance(old, list | tuple) == isinstance(SMALL[field], tuple):
            values[field] = SMALL[field]
        elif field.endswith("_token_id") and isinstance(old, int) and old >= 128:
            values[field] = 1
    if "num_key_value_heads" in values and getattr(default, "num_key_value_heads", 0) == getattr(default, "num_attention_heads", 1):
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    return config_class(**values)


def build_transformer(kind: str) -> Specimen:
    config = shrink(CONFIG_MAPPING[kind])
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    class_name = causal or auto.MODEL_MAPPING_NAMES[kind]
    class_name = class_name[0] if isinstance(class_name, tuple) else class_name
    model_class = getattr(transformers, class_name)
    model = model_class(config)
    return Specimen(model.float(), inputs_for(model, config))


def inputs_for(model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Random inputs for the arguments `forward` has and needs."""
    taken = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    wanted = [main] + [field for field in ("attention_mask", "decoder_input_ids", "bbox") if field in taken]
    if main != "input_ids":  # a mask over what the model makes of the image or sound, whose length is its business
        wanted = [field for field in wanted if field != "attention_mask"]
    if main == "input_ids" and "pixel_values" in taken and not hasattr(config, "vision_config"):
        wanted.append("pixel_values")
    if main == "pixel_values" and "input_ids" in taken:
        wanted.append("input_ids")
    if not getattr(config, "is_encoder_decoder", False):
        wanted = [field for field in wanted if field != "decoder_input_ids"]
    makers = {"input_ids": make_tokens, "decoder_input_ids": make_tokens, "attention_mask": make_mask, "bbox": make_boxes,
              "pixel_values": make_image, "input_values": make_waveform, "input_features": make_spectrogram}
    return {field: makers[field](config, main) for field in wanted if field in makers}


def field_of(config: Any, name: str, default: Any) -> Any:
    """A field of the configuration or of the first nested one that has it."""
    nested = [getattr(config, part, None) for part in ("text_config", "vision_config", "audio_config")]
    for place in [config, *nested]:
        value = getattr(place, name, None)
        if value is not None:
            return value
    return default


def make_tokens(config: Any, main: str) -> torch.Tensor:
    return torch.randint(3, int(field_of(config, "vocab_size", 128)) - 2, (2, TOKENS))


def make_mask(config: Any, main: str) -> torch.Tensor:
    length = {"input_values": 4000, "input_features": 64}.get(main, TOKENS)
    return torch.ones(2, length, dtype=torch.long)


def make_boxes(config: Any, main: str) -> torch.Tensor:
    low, high = torch.randint(0, 50, (2, TOKENS, 2)), torch.randint(50, 100, (2, TOKENS, 2))
    return torch.cat([low, high], -1)


def make_image(config: Any, main: str) -> torch.Tensor:
    size = field_of(config, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (2, int(field_of(config, "num_channels", 3)), int(height), int(width))
    frames = getattr(config, "num_frames", None)
    return torch.randn(shape[0], frames, *shape[1:]) if frames else torch.randn(shape)


def make_waveform(config: Any, main: str) -> torch.Tensor:
    return torch.randn(2, 4000)


def make_spectrogram(config: Any, main: str) -> torch.Tensor:
    bins = int(field_of(config, "num_mel_bins", field_of(config, "input_feat_per_channel", 16)))
    frames = 2 * int(field_of(config, "max_source_positions", 32))
    return torch.randn(2, bins, frames)


# -- timm ------------------------------------------------------------------------------------------

SIZE_WORDS: Final = ("atto", "femto", "pico", "nano", "xxtiny", "xxs", "tiny", "test", "mini", "small", "t0", "b0", "s0", "xs", "_18", "18", "_26", "_50", "_s", "b1")


def smallest_of(family: str) -> list[str]:
    """Entry points of a family, likely smallest first."""
    found = [name for name in timm.list_models(module=family) if "test_" not in name]

    def rank(name: str) -> tuple[int, int, str]:
        hits = [position for position, word in enumerate(SIZE_WORDS) if word in name]
        return (min(hits, default=len(SIZE_WORDS)), len(name), name)

    return sorted(found or timm.list_models(module=family), key=rank)


def build_timm(family: str) -> Specimen:
    """The first of the family's small models that builds; a small image where the model allows it."""
    failure: Exception = ValueError(f"timm has no entry point in {family}")
    for entry in smallest_of(family)[:3]:
        for size in (64, 96, 128, None):
            sizes = {"img_size": size} if size else {}
            try:
                model = timm.create_model(entry, num_classes=10, **sizes)
                image = size or model.default_cfg.get("input_size", (3, 224, 224))[-1]
            except TypeError:  # the model takes no img_size: any image works
                model = timm.create_model(entry, num_classes=10)
                image = 64
            except (AssertionError, ValueError, RuntimeError) as error:
                failure = error
                continue
            try:
                with torch.no_grad():
                    model.eval()(torch.randn(1, 3, image, image))
            except (AssertionError, ValueError, RuntimeError, IndexError) as error:
                failure = error
                continue
            return Specimen(model, {"x": torch.randn(2, 3, image, image)})
    raise failure
