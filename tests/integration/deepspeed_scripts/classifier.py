"""A tutorial loop: command-line arguments, a data set, the engine's own optimizer and schedule, a checkpoint."""

import argparse
import json

import deepspeed
import torch
from torch import nn


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.images = torch.randn(256, 1, 8, 8, generator=g)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long() + 2 * (self.images[:, 0, 0, 0] > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc1 = nn.Linear(8 * 36, 64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def add_argument():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save_dir", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = add_argument()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Digits()
    )
    fp16 = model_engine.fp16_enabled()
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for inputs, labels in trainloader:
            inputs, labels = inputs.to(model_engine.device), labels.to(model_engine.device)
            if fp16:
                inputs = inputs.half()
            outputs = model_engine(inputs)
            loss = criterion(outputs.float(), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    model_engine.save_checkpoint(args.save_dir, client_state={"epochs": args.epochs})
    _, client_state = model_engine.load_checkpoint(args.save_dir)
    if deepspeed.comm.get_rank() == 0:
        print(json.dumps({
            "first": sum(losses[:4]) / 4, "last": sum(losses[-4:]) / 4, "steps": model_engine.global_steps,
            "state": client_state, "lr": scheduler.get_last_lr()[0], "stage": model_engine.zero_optimization_stage(),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
