"""Runs one seed of the simulation and prints its story; with two numbers, every seed from the first to the second.

python -m tests.simulation.run_seed 17
python -m tests.simulation.run_seed 0 1000
"""

import sys
import time

from .chaos import run_seed


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]]
    if len(numbers) == 1:
        try:
            print(run_seed(numbers[0], tracing=True).script())
        except AssertionError as error:
            print(error)
            return 1
        return 0
    failed: list[int] = []
    began, steps = time.process_time(), 0
    for seed in range(numbers[0], numbers[1]):
        try:
            steps += run_seed(seed).clock.steps
        except AssertionError as error:
            failed.append(seed)
            print(str(error).splitlines()[0][:400])
    took = time.process_time() - began
    print(f"{numbers[1] - numbers[0]} seeds, {steps} steps, {took:.1f} s, failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
