"""A small GPT, trained on the text of Python's own standard library: the example trainer of perdure.

    python examples/train_gpt.py                                    # one process, nobody watches, nothing is saved
    perdure run --nproc 4 --save $PWD/checkpoints --save-interval 20 -- python examples/train_gpt.py
                                                                    # four ranks that recover in place

A run that is broken on the way ends with the same parameters, to the bit, as one that is not (same world size), because

- the training function can be called again at any time: all that it needs it makes itself or reads from a checkpoint;
- what a step does depends on its number alone: the data it reads and the random numbers of its dropout;
- a checkpoint is whole or absent, and all ranks resume from the same one: `round.checkpointer` sees to both.
"""

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import perdure

VOCABULARY = 256  # bytes
CORPUS_BYTES = 2_000_000
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class Result(NamedTuple):
    rank: int
    step: int
    loss: float
    digest: str


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_2(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, context: int, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> Tensor:
    """The first CORPUS_BYTES of the standard library's top-level modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch_of(step: int, corpus: Tensor, rank: int, world_size: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the step's global batch, which depends on nothing but the step."""
    dice = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - context, (size * world_size,), generator=dice)[rank::world_size]
    windows = torch.stack([corpus[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds. Its tensors are the ones in use, so restoring into it restores these."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@perdure.resilient
def train(round: perdure.Round, options: argparse.Namespace) -> Result:
    with round.section("setup"):
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        dist.init_process_group("nccl" if on_gpu else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        corpus = read_corpus()

        torch.manual_seed(0)
        model = GPT(options.context).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        start = 0
        if round.resume is not None:
            state = state_of(model, optimizer)
            start = round.checkpointer.restore(state) or 0
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        parallel = DistributedDataParallel(model)

        def loss_of(step: int) -> Tensor:
            tokens, targets = batch_of(step, corpus, rank, world_size, options.batch_size, options.context)
            return parallel(tokens.to(device), targets.to(device))

        # DDP lays out its gradient buckets anew after its first backward pass, and the layout decides in which order
        # gradients are summed. Spend that pass here, or the first step after a resume would round differently.
        loss_of(0).backward()

    for step in range(start + 1, options.steps + 1):
        with round.section("step"):
            torch.manual_seed(step * world_size + rank)
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
        round.ping(step)
        stopping = round.should_stop(step)
        if stopping or step == options.steps or round.checkpointer.due(step):
            round.checkpointer.save(step, state_of(model, optimizer))
            if rank == 0:
                print(f"step={step} loss={loss.item():.4f} round={round.index}", flush=True)
        start = step
        if stopping:
            break

    model.eval()
    with torch.no_grad():
        tokens, targets = batch_of(0, corpus, 0, 1, 16, options.context)
        final_loss = model(tokens.to(device), targets.to(device)).item()
    dist.destroy_process_group()
    return Result(rank, start, final_loss, digest_of(model))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the text of Python's standard library.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    options = parser.parse_args()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)  # a launcher, and perdure before each round, know better
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    result = train(options)
    if result is not None and result.rank == 0:  # a reserve that never got a seat has no result
        print(f"final step={result.step} loss={result.loss:.6f} digest={result.digest}", flush=True)


if __name__ == "__main__":
    main()
