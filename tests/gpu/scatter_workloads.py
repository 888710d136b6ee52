"""What the GPU's tests of operators with an index go through."""

SUM = "index_add(x=f32[1000,64], dim=0, index=i64[30000], source=f32[30000,64])!donate=x"
LARGE_SUM = "index_add(x=bf16[50000,40], dim=0, index=i32[20011], source=bf16[20011,40])"
UPDATE = "scatter(x=f64[70000], dim=0, index=i64[100000], src=f64[100000])"
LARGE_UPDATE = "scatter(x=f32[300000], dim=0, index=i32[200000], src=f32[200000])!donate=x"

WORKLOADS = [
    *(SUM, LARGE_SUM, UPDATE, LARGE_UPDATE),
    "index_add(x=f16[7,37], dim=0, index=i64[999], source=f16[999,37], alpha=-2.0)",
    "scatter(x=bf16[9000,96], dim=0, index=i64[7000,96]@strides(1,0), src=2.5)!donate=x",
    "scatter(x=i64[3,900,37], dim=1, index=i32[3,700,37]@strides(0,1,0), src=-7)",
    "index_add(x=f64[6,5,8], dim=1, index=i64[200], source=f64[6,200,8])",
    "index_add(x=bf16[20,64], dim=0, index=i64[100000], source=bf16[100000,64])!donate=x",
    "index_add(x=i64[600,5], dim=0, index=i64[2000], source=i64[2000,5])",
    "index_add(x=f32[90,40]@strides(44,1), dim=0, index=i64[9000], source=f32[9000,40])!donate=x",
    "index_add(x=f32[900,64], dim=0, index=i64[30000], source=f32[30000,64])!nondeterministic",
    "index_add(x=f32[5,70,37], dim=1, index=i64[999], source=f32[5,999,37], alpha=-2.0)"
    "!donate=x!nondeterministic",
    "scatter_add(x=f32[300000], dim=0, index=i64[500000], src=f32[500000])!nondeterministic",
    "embedding_backward(grad=f64[40,50,96], index=i64[40,50], num_weights=500, padding_idx=3)"
    "!nondeterministic",
    "gather(x=f16[9000,48], dim=0, index=i64[30000,48]@strides(1,0))",
    "gather(x=f64[3,900,5], dim=1, index=i32[3,2000,5])",
    "gather(x=i32[40,300]@strides(1,40), dim=0, index=i64[500,240])",
    "gather(x=bf16[2,3,50,4,5,6], dim=-4, index=i64[2,3,70,4,5,6])",
    "gather(x=f32[100000], dim=0, index=i64[300001])",
    "scatter_add(x=f32[70000,37], dim=0, index=i64[30000,36], src=f32[30001,37])!donate=x",
    "scatter_add(x=f64[300000], dim=0, index=i32[500000], src=f64[500000])",
    "scatter_add(x=f32[8192,50257], dim=1, index=i64[8192,1], src=f32[8192,1])!donate=x",
    "scatter_reduce(x=f64[9,90000,3], dim=1, index=i32[8,100,3], src=f64[9,101,3], reduce=mean)",
    "scatter_add(x=bf16[3,900,64], dim=1, index=i32[3,50000,64], src=bf16[3,50000,64])",
    "scatter_reduce(x=f32[500,90], dim=1, index=i64[400,700]@strides(1,400), src=f32[500,700], "
    "reduce=prod)",
    "scatter_reduce(x=i64[70000,9], dim=0, index=i64[9000,9], src=i64[9000,9], reduce=mean)",
    "index_reduce(x=f16[900,40], dim=0, index=i64[9000], source=f16[9000,40], reduce=prod)",
    "index_reduce(x=f32[90000,24], dim=0, index=i64[40000], source=f32[40000,24], reduce=prod, "
    "include_self=False)",
    "scatter(x=f32[20000000], dim=0, index=i64[17000000], src=f32[17000000])!donate=x",
    "index_add(x=f32[3000000], dim=0, index=i64[50000], source=f32[50000])",
    "index_add(x=f32[40000,96], dim=0, index=i64[20000], source=f32[20000,96])!donate=x",
    "index_add(x=f16[3,900,37], dim=1, index=i32[900], source=f16[3,900,37], alpha=-2.0)!donate=x",
    "index_reduce(x=bf16[5000,24], dim=0, index=i64[4000], source=bf16[4000,24], reduce=mean)",
    "index_add(x=f32[30522,768], dim=0, index=i64[1024], source=f32[1024,768])!donate=x",
    "index_add(x=f16[3,50,37], dim=1, index=i32[2048], source=f16[3,2048,37], alpha=-2.0)",
    "index_reduce(x=f64[300,5], dim=0, index=i64[600], source=f64[600,5], reduce=prod)",
    "embedding_backward(grad=bf16[32,768], index=i64[32], num_weights=900, padding_idx=3)",
    *(
        f"index_reduce(x=f32[300,24], dim=0, index=i64[5000], source=f32[5000,24], "
        f"reduce={reduce}, include_self={own})"
        for reduce in ("mean", "amax", "amin")
        for own in (True, False)
    ),
    "scatter_add(x=f32[900,64], dim=0, index=i64[9000,64]@strides(1,0), src=f32[9000,64])",
    "embedding_backward(grad=f32[40,50,96], index=i64[40,50], num_weights=500, padding_idx=3)",
    "embedding_backward(grad=bf16[9000,1024], index=i32[9000], num_weights=128256)",
    "embedding_backward(grad=f32[5000,20], index=i64[5000], num_weights=70, "
    "scale_grad_by_freq=True)",
    "scatter(x=f32[1000000], dim=0, index=i64[1000000], src=f32[1000000])",
    "scatter(x=f16[1500000], dim=0, index=i64[1300001], src=f16[1300001])!donate=x",
    "scatter(x=f32[100,16,7,7], dim=0, index=i64[130,16,7,7], src=f32[130,16,7,7])",
    "scatter(x=f16[100,16,7,7], dim=1, index=i32[100,9,7,7], src=f16[100,9,7,7])!donate=x",
    "scatter(x=i64[10,16,7,7], dim=2, index=i64[10,16,20,7], src=i64[10,16,20,7])",
    "scatter(x=bf16[1000,16,7,7], dim=3, index=i64[1000,16,7,3], src=bf16[1000,16,7,3])",
    "scatter(x=bf16[300001], dim=0, index=i64[400000], src=bf16[400000])",
    "scatter(x=i32[90000], dim=0, index=i64[400], src=3.0)",
    "scatter(x=f32[50], dim=0, index=i64[1], src=1.5)",
    "scatter(x=f32[20000,64], dim=0, index=i64[20000,64], src=2.5)!donate=x",
    "scatter(x=f32[200000], dim=0, index=i64[600000], src=f32[600000])",
    "scatter(x=f16[3,9000,37], dim=1, index=i32[3,12000,37], src=f16[3,12000,37])",
    "scatter(x=f32[5000,96], dim=0, index=i64[7000,96]@strides(1,0), src=f32[7000,96])",
    "scatter(x=bf16[3,900,37], dim=1, index=i32[3,700,37]@strides(0,1,0), "
    "src=bf16[3,700,37])!donate=x",
    "scatter(x=f32[8,2000,64], dim=1, index=i64[8,5000,64]@strides(5000,1,0), src=f32[8,5000,64])",
    "scatter(x=bf16[64,900,4,32], dim=1, index=i64[64,1,4,32]@strides(1,1,0,0), "
    "src=bf16[64,1,4,32])!donate=x",
    "scatter(x=f64[3,4,700,6], dim=2, index=i32[3,4,3000,6]@strides(12400,3100,1,0), "
    "src=2.5)!donate=x",
    "scatter_add(x=f32[8,2000,64], dim=1, index=i64[8,50000,64]@strides(50000,1,0), "
    "src=f32[8,50000,64])!donate=x",
    "scatter_add(x=bf16[5,300,37], dim=1, index=i32[5,20000,37]@strides(20000,1,0), "
    "src=bf16[5,20000,37])",
    "scatter_reduce(x=f16[8,2000,40], dim=1, index=i64[8,9000,40]@strides(9000,1,0), "
    "src=f16[8,9000,40], reduce=amax, include_self=False)",
    "scatter_reduce(x=f32[70,90,24], dim=1, index=i64[70,300,24]@strides(300,1,0), "
    "src=f32[70,300,24], reduce=prod)",
    "scatter(x=f32[1000,64], dim=0, index=i64[500,1], src=f32[500,1])!donate=x",
    "scatter(x=f32[500,9000], dim=1, index=i64[500,1], src=1.0)!donate=x",
    "scatter(x=f16[50,300,64], dim=1, index=i64[49,1,60], src=f16[50,1,64])",
    "scatter(x=f32[1000,64], dim=0, index=i64[5000,60], src=f32[6000,64])",
    "scatter(x=f16[16,9000,96], dim=1, index=i32[12,40,90], src=f16[16,41,96])!donate=x",
    "scatter(x=f64[300,37,5], dim=0, index=i64[90000,30,5]@strides(1,0,90000), "
    "src=f64[90001,37,5])",
    "scatter(x=bf16[2000000], dim=0, index=i64[1500000], src=bf16[1500001])",
    "scatter(x=i64[3,5000,40], dim=-2, index=i64[3,7000,33], src=-7)!donate=x",
    "scatter_add(x=f32[100,16,7,7], dim=0, index=i64[130,16,7,7], src=f32[130,16,7,7])",
    "scatter_add(x=f32[20000,40], dim=0, index=i64[30000,40], src=f32[30000,40])",
    "scatter_add(x=bf16[300000], dim=0, index=i32[500000], src=bf16[500000])!donate=x",
    "scatter_reduce(x=f16[2,5000], dim=1, index=i64[2,200000], src=f16[2,200000], reduce=sum)",
    "scatter_add(x=f64[20000,40], dim=0, index=i64[30000,40], src=f64[30000,40])!donate=x",
    "scatter_reduce(x=f32[30000,40], dim=0, index=i64[90000,40], src=f32[90000,40], reduce=prod)",
    "scatter_reduce(x=bf16[30000,40], dim=0, index=i64[90000,40], src=bf16[90000,40], reduce=amax)",
    "scatter_reduce(x=f64[300000], dim=0, index=i32[500000], src=f64[500000], reduce=amin, "
    "include_self=False)!donate=x",
    "scatter_add(x=i64[30000,40], dim=0, index=i64[90000,40], src=i64[90000,40])",
    "scatter_reduce(x=i32[300000], dim=0, index=i32[500000], src=i32[500000], reduce=sum, "
    "include_self=False)!donate=x",
    "scatter_reduce(x=bf16[3,70000], dim=1, index=i32[3,200000], src=bf16[3,200000], reduce=prod, "
    "include_self=False)!donate=x",
    "scatter_reduce(x=f16[50,31], dim=0, index=i64[80,31], src=f16[80,31], reduce=mean)",
    "scatter_reduce(x=f32[50,31], dim=1, index=i64[50,80], src=f32[50,80], reduce=amax, "
    "include_self=False)",
    "index_add(x=f32[100000,50], dim=1, index=i64[60], source=f32[100000,60])",
    "index_reduce(x=f32[70000,9,2], dim=1, index=i64[60], source=f32[70000,60,2], reduce=prod)"
    "!donate=x",
    "index_add(x=f32[10,3000001], dim=0, index=i64[60], source=f32[60,3000001])!donate=x",
]
