"""HCFormer's token mixing: patches around centres inside windows, windows around centres of the whole map."""
