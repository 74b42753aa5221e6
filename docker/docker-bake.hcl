# All images: docker buildx bake -f docker/docker-bake.hcl
variable "REGISTRY" { default = "localhost/distributed-training-examples" }
variable "TAG" { default = "0.2.0" }
variable "COMPILER" { default = "no" }
variable "REVISION" { default = "unknown" }

group "default" { targets = ["base", "examples"] }

target "base" {
  dockerfile = "docker/base/Dockerfile"
  args       = { COMPILER = COMPILER, VERSION = TAG, REVISION = REVISION }
  tags       = ["${REGISTRY}/base:${TAG}"]
}

target "examples" {
  name = example
  matrix = {
    example = [
      "bert_dp",
      "gan_ddp",
      "imagenet_ddp",
      "manual_allreduce_sgd",
      "mnist_dataparallel",
      "mnist_ddp_spawn",
      "resnet_pipeline",
    ]
  }
  dockerfile = "docker/${example}/Dockerfile"
  contexts   = { base = "target:base" }
  args       = { BASE = "base" }
  tags       = ["${REGISTRY}/${example}:${TAG}"]
}
