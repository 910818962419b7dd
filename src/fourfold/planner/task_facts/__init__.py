"""The facts of a task: what its model computes, keeps and sends, found by a fake step on the meta device."""
