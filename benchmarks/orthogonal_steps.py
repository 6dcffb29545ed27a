"""Steps to an accuracy with orthogonal steps for all layers: `python benchmarks/orthogonal_steps.py --data-root DIR`.

The small convolutional network of the preset dbn-cifar10-convnet (scale laptop) on CIFAR-10, with the form of its
schedule. By default it has half the width, sees the images at half their size, and is trained for one epoch with half
the batch and half the rate, which takes 16 s of one core for a training; `--width 32 --size 32 --epochs 4 --batch 250`
is the preset, at 250 s. Only the step of the inner convolutions differs: SGD with Nesterov momentum, NOG of the
gradient, of the update and of fixed length, and torch.optim.Muon, which takes a convolution as the matrix
(out, in·k·k) here. The rest of the network keeps SGD.

Every contender has the same number of rates, which the first seed chooses from; the other seeds take the chosen one.
They are compared by the accuracy on 5,000 training images that are kept out of training; the test images are not read.
The result of each training is written when it ends, and its state at each evaluation, so that the command, repeated,
goes on where it was.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from common import environment
from torch import nn
from torch.nn import functional as F

from orthocond.lab.classification import data
from orthocond.lab.classification.evaluate import score
from orthocond.lab.classification.networks.prepare import prepare
from orthocond.lab.classification.presets import PRESETS
from orthocond.steps import NearestOrthogonal, treat

PRESET = "dbn-cifar10-convnet"
UPDATE = NearestOrthogonal(of="update")
FIXED = NearestOrthogonal(of="update", scale="spectral")
# name: (treatment of the inner convolutions, their rates as fractions of that of the preset)
CONTENDERS = {
    "SGD": (None, (0.5, 1.0, 2.0)),
    "NOG of the gradient": (NearestOrthogonal(), (0.04, 0.08, 0.16)),
    "NOG of the update": (UPDATE, (0.5, 1.0, 2.0)),
    "NOG of fixed length": (FIXED, (0.08, 0.16, 0.32)),
    "Muon": ("muon", (0.08, 0.16, 0.32)),
}


class Training:
    """One training: a network, its optimizers, and what it has reached."""

    def __init__(self, config, pair, treatment, rate):
        torch.manual_seed(config.seed)
        self.config = config
        self.batches = data.pipeline(config, pair.train, train=True)
        self.held_out = replace(self.batches, data=pair.held_out, train=False)
        self.epoch_steps = len(self.batches)
        network = prepare(config, pair)
        self.model = network.module
        stem = self.model.get_submodule(network.pre_svd)
        inner = [m for m in self.model.modules() if isinstance(m, nn.Conv2d) and m is not stem]
        self.make_optimizers(inner, treatment, rate)
        self.step, self.history = 0, []

    def make_optimizers(self, inner, treatment, rate):
        schedule = self.config.schedule
        weights = [layer.weight for layer in inner]
        rest = [p for p in self.model.parameters() if not any(p is w for w in weights)]
        plain = treatment is None
        groups = [{"params": rest, "factor": 1.0, "weight_decay": schedule.weight_decay}]
        self.flat = []
        if treatment == "muon":
            # The matrices share the memory of the weights.
            self.flat = [(w, nn.Parameter(w.detach().view(len(w), -1))) for w in weights]
            muon = torch.optim.Muon(
                [{"params": [matrix for _, matrix in self.flat], "factor": rate}],
                lr=1.0,
                weight_decay=0.0,
                momentum=schedule.momentum,
                adjust_lr_fn="original",
            )
        else:
            decay = schedule.weight_decay if plain else 0.0
            groups.append({"params": weights, "factor": rate, "weight_decay": decay})
        sgd = torch.optim.SGD(groups, schedule.lr, schedule.momentum, nesterov=schedule.nesterov)
        if isinstance(treatment, NearestOrthogonal):
            treat(inner, sgd, gradient=treatment, spectrum_every=0)
        self.optimizers = [sgd, muon] if self.flat else [sgd]

    def rate(self):
        """A warm-up from a fifth, then linear to 0, as in the preset."""
        schedule = self.config.schedule
        done = self.step / (schedule.epochs * self.epoch_steps)
        if done < schedule.warmup:
            return schedule.lr * (0.2 + 0.8 * done / schedule.warmup)
        return schedule.lr * (1 - done) / (1 - schedule.warmup)

    def make_step(self, images, labels):
        self.model.train()
        lr = self.rate()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]
        images = images.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=self.config.schedule.label_smoothing)
        loss.backward()
        for weight, matrix in self.flat:
            matrix.grad, weight.grad = weight.grad.flatten(1), None
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return float(loss.detach())

    def run(self, every, steps, state):
        """Train to the end, and evaluate after every so many steps."""
        self.load(state)
        loss = 0.0
        while self.step < steps and math.isfinite(loss):
            epoch, index = divmod(self.step, self.epoch_steps)
            for number, (images, labels) in enumerate(self.batches.batches(epoch)):
                if number < index:
                    continue
                loss = self.make_step(images, labels)
                if self.step % every == 0 or self.step == steps:
                    error = score(self.model, self.held_out, layout=torch.channels_last).error
                    self.history.append({"step": self.step, "loss": loss, "accuracy": 100 - error})
                    self.save(state)
                if self.step == steps or not math.isfinite(loss):
                    break
        return self.history

    def save(self, path):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        parts = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step, "history": self.history}
        partial = path.with_suffix(".part")
        torch.save(parts, partial)
        partial.replace(path)

    def load(self, path):
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, found in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(found)
            self.step, self.history = state["step"], state["history"]


def steps_to(history, accuracy):
    """The first step at which the accuracy was reached, or None."""
    return next((entry["step"] for entry in history if entry["accuracy"] >= accuracy), None)


def best_rate(results, name, seed):
    """The rate of the best accuracy at the end."""
    ends = {r["rate"]: r["history"] for r in results.values() if (r["contender"], r["seed"]) == (name, seed)}
    return max(ends, key=lambda rate: ends[rate][-1]["accuracy"] if ends[rate] else 0.0)


def summary(results, targets):
    """For each contender: the rate that the first seed chose, and what all seeds reached with it."""
    table = {}
    first = next(iter(results.values()))["seed"]
    for name in dict.fromkeys(r["contender"] for r in results.values()):
        rate = best_rate(results, name, first)
        runs = [r["history"] for r in results.values() if (r["contender"], r["rate"]) == (name, rate)]
        accuracies = [history[-1]["accuracy"] if history else 0.0 for history in runs]
        table[name] = {"rate": rate, "accuracies": accuracies, "mean accuracy": statistics.fmean(accuracies)} | {
            f"steps to {target:g} %": [steps_to(history, target) for history in runs] for target in targets
        }
    return table


def plan(options, results):
    """The trainings still to do, one after the other: all rates of the first seed, then the best for the others."""
    first, *others = options.seeds
    for index in (1, 0, 2):  # the middle rate of all contenders comes first
        for name in options.contenders:
            yield name, CONTENDERS[name][1][index], first
    for seed in others:
        for name in options.contenders:
            yield name, best_rate(results, name, first), seed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", help="folder of the data sets, with cifar10 in it")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/orthogonal_steps.json"))
    parser.add_argument("--states", type=Path, default=Path("runs/orthogonal_steps"), help="folder of unfinished runs")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--size", type=int, default=16, help="sides of the images")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument("--targets", type=float, nargs="+", default=[40, 50, 55, 60])
    parser.add_argument("--every", type=int, default=30, help="steps between evaluations")
    parser.add_argument("--steps", type=int, help="end after so many steps, for a trial")
    parser.add_argument("--sprites", action="store_true", help="sprites instead of CIFAR-10, for a trial")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.states.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    config = PRESETS[PRESET]["laptop"]
    lr = config.schedule.lr * options.batch / config.schedule.batch_size
    schedule = replace(config.schedule, epochs=options.epochs, batch_size=options.batch, lr=lr)
    config = replace(config, model=replace(config.model, width=options.width), schedule=schedule)
    padding = config.data.crop_padding * options.size // config.data.size
    images = replace(config.data, validation=5000, size=options.size, resize=options.size, crop_padding=padding)
    config = replace(config, data=images)
    pair = data.stand_in(config) if options.sprites else data.load_data(images, options.data_root)
    results = json.loads(options.output.read_text())["results"] if options.output.exists() else {}
    for name, rate, seed in plan(options, results):
        key = f"{name}, rate {rate:g}, seed {seed}"
        if key in results:
            continue
        training = Training(replace(config, seed=seed), pair, CONTENDERS[name][0], rate)
        steps = options.steps or config.schedule.epochs * training.epoch_steps
        state = options.states / f"{key.replace(' ', '-').replace(',', '')}.pt"
        history = training.run(options.every, steps, state)
        results[key] = {"contender": name, "rate": rate, "seed": seed, "history": history}
        setting = {key: getattr(options, key) for key in ("width", "size", "epochs", "batch")}
        table = summary(results, options.targets)
        values = {"environment": environment(), "setting": setting, "results": results, "table": table}
        options.output.write_text(json.dumps(values, indent=1) + "\n")
        state.unlink(missing_ok=True)
        accuracy = history[-1]["accuracy"] if history else math.nan
        print(f"{key}: {accuracy:.2f} % after {training.step} steps", flush=True)
    for name, row in summary(results, options.targets).items():
        print(name, row)


if __name__ == "__main__":
    main()
