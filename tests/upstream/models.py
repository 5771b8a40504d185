"""Tiny stand-ins for the hub's models that vLLM's tests name, so that nothing is downloaded.

Each has a config of the same model class with the sizes of a toy, random weights, and a tokenizer.
vLLM finds them by the names of the real models, through its own VLLM_MODEL_REDIRECT_PATH. To add a
name, add a line to `STAND_INS`. transformers writes them: `integration/demo/tiny_checkpoint.py`
knows other model classes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

REDIRECT_FILE = "redirect.json"
END_OF_TEXT = "<|endoftext|>"
#: Logits are about this wide: one token stands out, so that rounding seldom changes which.
LOGITS_STD = 4.0

_PROSE = (
    "The quick brown fox jumps over the lazy dog, and this is a test of what it thinks.",
    "Hello, my name is nobody in particular; what is your name, and where do you come from?",
    "The capital of a country is where its parliament sits, most of the time.",
    "A large language model reads the words before and says which word comes next.",
    "Several engines run in parallel, each with its own data and its own part of the experts.",
    "Pause the engine, wait until it is idle, then resume the generation of the other tokens.",
)
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_DECODER = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
_LLAMA = {**_DECODER, "intermediate_size": 256}
_OPT = {
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
_LONG_OPT = {**_OPT, "max_position_embeddings": 131072}
#: PowerMoE's own 40 experts, of which 8 answer for a token; 40 divides by 2, 4 and 8 ranks.
_GRANITE_MOE = {
    **_DECODER,
    "intermediate_size": 64,
    "num_local_experts": 40,
    "num_experts_per_tok": 8,
    "attention_multiplier": 32**-0.5,
}
_QWEN_MOE = {
    **_LLAMA,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_LONG_QWEN_MOE = {**_QWEN_MOE, "max_position_embeddings": 131072}
#: LLaVA 1.5 reads pictures of this size as 24 x 24 patches, a token each.
_PICTURE_SIZE, _PICTURE_TOKENS = 336, 576


@dataclass(frozen=True)
class StandIn:
    """A toy: transformers' name of the model class, and the sizes that differ from its defaults.

    pictures: it reads pictures, and has no weights: BLIP-2 around the model, for schedulers. Most
        other models that read pictures import torchvision, which CPU environments lack.
    """

    model_type: str
    sizes: Mapping[str, Any]
    dtype: str = "bfloat16"
    seed: int = 0
    pictures: bool = False


STAND_INS: Mapping[str, StandIn] = {
    "facebook/opt-125m": StandIn("opt", _OPT, dtype="float16"),
    "facebook/opt-350m": StandIn("opt", _OPT, dtype="float16"),
    "hmellor/tiny-random-LlamaForCausalLM": StandIn("llama", _LLAMA),
    "llava-hf/llava-1.5-7b-hf": StandIn("opt", _LONG_OPT, dtype="float16", pictures=True),
    "ibm-research/PowerMoE-3b": StandIn("granitemoe", _GRANITE_MOE, dtype="float32"),
    "meta-llama/Llama-3.1-8B-Instruct": StandIn("qwen3_moe", _LONG_QWEN_MOE),
    "meta-llama/Llama-3.2-1B-Instruct": StandIn("llama", _LLAMA),
    "Qwen/Qwen2.5-VL-3B-Instruct": StandIn("opt", _LONG_OPT, pictures=True),
    "Qwen/Qwen3-0.6B": StandIn("qwen3", {**_LLAMA, "head_dim": 32}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": StandIn("llama", _LLAMA),
}


def redirect_file(folder: Path) -> Path:
    """The file for VLLM_MODEL_REDIRECT_PATH: the hub's names, and a folder with a model for each.

    The models are written once, and anew if this module or transformers has changed.
    """
    import transformers

    what = Path(__file__).read_bytes() + transformers.__version__.encode()
    target = folder.resolve() / hashlib.sha256(what).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / "lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                draft = Path(scratch) / "models"
                for name, stand_in in STAND_INS.items():
                    _write(draft / name, stand_in)
                draft.rename(target)
    # Always: whoever copies the folder to another machine may have another home there.
    draft = target / f"{REDIRECT_FILE}.{os.getpid()}"
    draft.write_text(json.dumps({name: str(target / name) for name in STAND_INS}), "utf-8")
    return draft.replace(target / REDIRECT_FILE)


def _write(folder: Path, stand_in: StandIn) -> None:
    """config.json, model.safetensors and the tokenizer's files."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer()
    if stand_in.pictures:
        _write_with_pictures(folder, stand_in, tokenizer)
        return
    config = _config(stand_in, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stand_in.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head *= LOGITS_STD * head.shape[1] ** -0.5 / head.std()
        # Its logit is 0, far below the best: a request ends by its length, as its test assumes.
        head[tokenizer.eos_token_id] = 0
    model.to(getattr(torch, stand_in.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # vLLM would take sampling parameters from it.
    (folder / "generation_config.json").unlink(missing_ok=True)


def _write_with_pictures(folder: Path, stand_in: StandIn, tokenizer: Any) -> None:
    """config.json of BLIP-2 with this model as its language model, and the processor's files."""
    from transformers import Blip2Config, Blip2Processor, BlipImageProcessorPil

    size = {"height": _PICTURE_SIZE, "width": _PICTURE_SIZE}
    processor = Blip2Processor(  # type: ignore[no-untyped-call]
        BlipImageProcessorPil(size=size), tokenizer, num_query_tokens=_PICTURE_TOKENS
    )
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    Blip2Config(
        text_config=_config(stand_in, tokenizer),
        vision_config={**small, "num_attention_heads": 2, "image_size": _PICTURE_SIZE},
        qformer_config={**small, "num_attention_heads": 2, "encoder_hidden_size": 64},
        num_query_tokens=_PICTURE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(processor.image_token.content),
        architectures=["Blip2ForConditionalGeneration"],
        dtype=stand_in.dtype,
    ).save_pretrained(folder)
    processor.save_pretrained(folder)


def _config(stand_in: StandIn, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    end = tokenizer.eos_token_id
    sizes = dict(stand_in.sizes)
    # Projections keep the variance of what they read, so that every layer has a say.
    std_name = "init_std" if stand_in.model_type == "opt" else "initializer_range"
    return AutoConfig.for_model(
        stand_in.model_type,
        vocab_size=len(tokenizer),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        dtype=stand_in.dtype,
        **{std_name: sizes["hidden_size"] ** -0.5, **sizes},
    )


def _tokenizer() -> Any:
    """Byte-level BPE over printable ASCII, so that every token is text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # What byte-level BPE writes for a line's end and a space.
    letters = ["\u010a", "\u0120", *map(chr, range(0x21, 0x7F))]
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=letters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_PROSE, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    fast.chat_template = _TEMPLATE
    return fast
