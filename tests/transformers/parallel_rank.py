"""One rank of a model that is split over two: ``parallel_rank.py RANK WORLD_SIZE FOLDER``; used by `test_parallel`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    import gpuarena_transformers.cache as cache_module
    from gpuarena_transformers import ArenaCache, cache_argument
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(tp_size=world)
    ).eval()
    # Each rank has another share free, and all have to agree.
    cache_module.free_nbytes = lambda device: 90_000 + 20_000 * rank
    agreed = ArenaCache.for_model(model).max_context_length
    measured = ArenaCache.for_model(model, 32, max_batch_size=3)
    logits = {}
    for name, cache in {"config": ArenaCache(model.config, 3, 32), "measured": measured}.items():
        ids = torch.arange(3, 12)[None]
        outputs = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            do_sample=False,
            max_new_tokens=6,
            output_logits=True,
            return_dict_in_generate=True,
            **{cache_argument(): cache},
        )
        logits[name] = torch.stack(outputs.logits)
        heads = [layer.spec.kv_heads for layer in cache.group.layers]
        assert len(cache.arenas) == 1
    torch.save(
        {"logits": logits, "heads": heads, "agreed": agreed, "tp_size": model.tp_size}, folder / f"{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
