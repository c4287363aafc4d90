"""A tiny model with random weights and a tokenizer of bytes, made up on the spot."""

from __future__ import annotations

from typing import Any

__all__ = ["random_model"]


def random_model() -> tuple[Any, Any]:
    """Return a Llama of 3 layers, 4 heads over 2 key/value heads and 8 192 positions, and a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Large enough for attention to look far back, so that a wrong cache shows in the answer.
                parameter.normal_(std=0.2, generator=generator)
        # Only printable ASCII can win: no control sequence reaches a terminal, and no answer ends early.
        printable = {"\u0120", *map(chr, range(33, 127))}  # U+0120 stands for the space
        never = [number for token, number in tokenizer.get_vocab().items() if token not in printable]
        model.lm_head.weight[never] = 0
    return model, tokenizer


def _byte_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, the chat markers, and SmolLM2's form of a chat."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


# Around the libraries.
