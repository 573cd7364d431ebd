"""What the tests share: the float64 reference, the promised bounds, subjects under test and their broken variants."""
