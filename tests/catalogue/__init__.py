"""Bad, unusual and damaged input over the whole public interface; functions and arguments are found, not listed."""
