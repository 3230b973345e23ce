"""What the compilers of accelerators that are not there make of the programs."""
