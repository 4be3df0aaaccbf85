"""A small GPT, trained on the text of Python's own standard library: the example trainer of perdure.

    python examples/train_gpt.py                                    # one process, nobody watches
    perdure run --nproc 4 -- python examples/train_gpt.py           # four ranks that recover in place

A run that is broken on the way ends with the same parameters, to the bit, as one that is not (same world size), because

- the training function can be called again at any time: all that it needs it makes itself or reads from the checkpoint;
- what a step does depends on its number alone: the data it reads and the random numbers of its dropout;
- the checkpoint is whole or absent: it is written aside, flushed and renamed, and no interrupt comes in between.
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
from torch.nn.parallel import DistributedDataParallel

import perdure

VOCABULARY = 256  # bytes
CORPUS_BYTES = 2_000_000
KEPT_CHECKPOINTS = 2
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


def save(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Put the checkpoint of `step` there in one piece, and remove all but the newest ones."""
    temporary = directory / "checkpoint.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / f"step_{step:08d}.pt")
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    for old in sorted(directory.glob("step_*.pt"))[:-KEPT_CHECKPOINTS]:
        old.unlink()


def newest_step(directory: Path, device: torch.device) -> int:
    """The newest step whose checkpoint every rank can see; 0 if there is none."""
    names = sorted(directory.glob("step_*.pt"))
    newest = torch.tensor(int(names[-1].stem.removeprefix("step_")) if names else 0, device=device)
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    return int(newest)


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
        start = newest_step(options.checkpoint_dir, device)
        if start:
            path = options.checkpoint_dir / f"step_{start:08d}.pt"
            state = torch.load(path, map_location=device, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
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
        if stopping or step == options.steps or step % options.checkpoint_every == 0:
            with round.section("checkpointing"), round.atomic():
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    save(options.checkpoint_dir, step, state)
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
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    options = parser.parse_args()
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)  # a launcher, and perdure before each round, know better
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    result = train(options)
    if result is not None and result.rank == 0:  # a reserve that never got a seat has no result
        print(f"final step={result.step} loss={result.loss:.6f} digest={result.digest}", flush=True)


if __name__ == "__main__":
    main()
