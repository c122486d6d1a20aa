"""Why the arms differ: what each ablation saves, ranked."""
