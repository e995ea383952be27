"""What every space is built from: numerics, curvatures, parameters that are points, the rules of a public function."""
