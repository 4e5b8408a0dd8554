package channel_test

import (
	"testing"

	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
