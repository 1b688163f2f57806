// Programs of plans whose weights visit: their texts, by hand.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "plan/stages.h"
#include "program/placed.h"

using helm::test::placed;
using helm::test::placed_to_visit;
using helm::test::texts;
using helm::test::TinyShape;

TEST_CASE("layers that visit come one ahead, with their pages") {
  TinyShape shape = placed_to_visit("cccaac", 4);
  CHECK(texts(shape).at(1) == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0 aside
3 up page layer.0 cached
4 accelerator run layer.0.attention..layer.0.mlp after 1 2 3
5 up visit layer.1 aside
6 down page layer.0 written after 4
7 up page layer.1 cached
8 accelerator run layer.1.attention..layer.1.mlp after 5 7
9 down page layer.1 written after 8
10 accelerator run layer.2.attention..layer.3.mlp
11 down copy x_out accelerator>cpu after 10
12 cpu run head after 11)");
  shape = placed_to_visit("acaccca", 5);
  CHECK(texts(shape).at(1) == R"(program visit
0 up visit layer.0 aside
1 accelerator run embedding
2 up page layer.0 cached
3 accelerator run layer.0.attention..layer.0.mlp after 0 2
4 up visit layer.2 aside
5 down page layer.0 written after 3
6 accelerator run layer.1.attention..layer.1.mlp
7 up page layer.2 cached
8 accelerator run layer.2.attention..layer.2.mlp after 4 7
9 up visit layer.3 aside after 3
10 down page layer.2 written after 8
11 up page layer.3 cached
12 accelerator run layer.3.attention..layer.3.mlp after 9 11
13 up visit layer.4 aside after 8
14 down page layer.3 written after 12
15 up page layer.4 cached
16 accelerator run layer.4.attention..layer.4.mlp after 13 15
17 down page layer.4 written after 16
18 accelerator run head
19 down copy logits accelerator>cpu after 18)");
}

TEST_CASE("weights of a device's units visit them in every step") {
  TinyShape shape = placed("caac", 2);
  shape.visiting = {"block.0", "up"};
  CHECK(texts(shape) == std::vector<std::string>{R"(program rest
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0.attention aside
3 accelerator run layer.0.attention after 1 2
4 up visit layer.0.mlp aside
5 accelerator run layer.0.mlp after 4
6 up visit layer.1.mlp aside after 3
7 accelerator run layer.1.attention
8 accelerator run layer.1.mlp after 6
9 down copy x_out accelerator>cpu after 8
10 cpu run head after 9)"});
}

TEST_CASE("more buffers let weights come further ahead") {
  TinyShape shape = placed("caac", 2);
  shape.visiting = {"block."};
  shape.visit_buffers = 3;
  CHECK(texts(shape) == std::vector<std::string>{R"(program rest
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0.attention aside
3 up visit layer.0.mlp aside
4 accelerator run layer.0.attention after 1 2
5 up visit layer.1.attention aside
6 accelerator run layer.0.mlp after 3
7 up visit layer.1.mlp aside after 4
8 accelerator run layer.1.attention after 5
9 accelerator run layer.1.mlp after 7
10 down copy x_out accelerator>cpu after 9
11 cpu run head after 10)"});
}

TEST_CASE("a layer visits as a whole, wherever its other units lie") {
  TinyShape shape = placed_to_visit("ccaacc", 2);
  CHECK(texts(shape).at(1) == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0 aside
3 up page layer.0 cached
4 accelerator run layer.0.attention..layer.0.mlp after 1 2 3
5 up visit layer.1 aside
6 down page layer.0 written after 4
7 up page layer.1 cached
8 accelerator run layer.1.attention..layer.1.mlp after 5 7
9 down page layer.1 written after 8
10 down copy x_out accelerator>cpu after 8
11 cpu run head after 10)");
}

TEST_CASE(
    "prompts read more weights than decoding where they visit then, or more experts are asked") {
  const auto more = [](const TinyShape& shape) {
    return helm::prompts_read_more(helm::Plan::from_json(helm::test::tiny_model(shape).plan));
  };
  CHECK_FALSE(more(placed("cccaac", 4)));
  CHECK(more(placed_to_visit("cccaac", 4)));
  TinyShape every_step = placed("caac", 2);
  every_step.visiting = {"block.0", "up"};
  CHECK_FALSE(more(every_step));
  TinyShape mixture;
  mixture.experts = 4;
  CHECK(more(mixture));
}
