"""The paper's tables and figures: from runs, trained where they are missing, with the paper's numbers beside ours."""
