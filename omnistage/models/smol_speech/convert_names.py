"""Names of tensors in the published ONNX graphs at which they are cut."""

HEART_FRAMES = "/Concat_43_output_0"
HEART_DURATIONS = "/Clip_output_0"

DURATION_NOISE = "/dp/RandomNormalLike_output_0"
PRIOR_MEAN = "/Transpose_3_output_0"
PRIOR_DEVIATION = "/Exp_1_output_0"
PRIOR_SAMPLE = "/Add_output_0"
FRAME_MASK = "/Cast_2_output_0"
LATENT = "/Mul_7_output_0"
