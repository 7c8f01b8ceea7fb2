import torch


def validate(model, batches):
    total_loss = 0
    for x in batches:
        total_loss += model(x).square().mean()
    return total_loss / len(batches)


def train(model, epochs):
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.randn(8192, 4096, device="cuda") for _ in range(12)]
    for epoch in range(epochs):
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        print(epoch, validate(model, batches))


layers = [torch.nn.Linear(4096, 4096, device="cuda") for _ in range(8)]
train(torch.nn.Sequential(*layers), epochs=3)
