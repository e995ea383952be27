"""HCFormer: a vision backbone whose token mixer is soft clustering."""
