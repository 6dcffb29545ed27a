"""The Trainer of Hugging Face with treated steps: every matrix of a small transformer gets orthogonal updates.

Call `treat` in create_optimizer, after the Trainer has created its optimizer; `Treatment.statistics` then says what was
treated. Needs `pip install transformers accelerate`.
"""

import logging
import tempfile
import warnings

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import orthocond as oc


class TreatedTrainer(Trainer):
    """All matrices of the encoder; the classifier, embeddings, biases and norms keep the plain step."""

    def create_optimizer(self, *arguments, **settings):
        optimizer = super().create_optimizer(*arguments, **settings)
        self.treatment = oc.treat(
            self.model.bert.encoder, optimizer, gradient=oc.NearestOrthogonal(of="update", rank_tol=1e-3)
        )
        return optimizer


class Counting(torch.utils.data.Dataset):
    """Are there more ones than twos in a row of twelve tokens?"""

    def __init__(self, count):
        self.tokens = torch.randint(1, 3, (count, 11), generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = torch.cat([torch.tensor([3]), self.tokens[index]])
        return {"input_ids": tokens, "labels": int((tokens == 1).sum() > (tokens == 2).sum())}


def main():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # advice of the Trainer on versions and pinned memory
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=4, max_position_embeddings=12, num_labels=2, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = TreatedTrainer(model=model, args=settings, train_dataset=Counting(1600))
        result = trainer.train()
        answers = trainer.predict(Counting(400))
    accuracy = (answers.predictions.argmax(1) == answers.label_ids).mean()
    treated = trainer.treatment.statistics
    print(f"{len(treated)} matrices treated in {treated[0].steps} steps, loss {result.training_loss:.3f}")
    print(f"accuracy {accuracy:.0%} (chance is 50%)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
