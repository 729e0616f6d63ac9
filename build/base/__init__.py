"""Files and facts that every stage reads: checkpoints, shapes, number formats, GPUs, option tables."""
