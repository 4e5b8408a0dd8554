package report

import (
	"fmt"
	"runtime"
	"strings"
	"unicode/utf8"
)

// Machine is what figures were made on.
type Machine struct {
	CPUs   int    `json:"cpus"`
	GOOS   string `json:"goos"`
	GOARCH string `json:"goarch"`
	Go     string `json:"go"`
}

// ThisMachine is the one that this program runs on.
func ThisMachine() Machine {
	return Machine{CPUs: runtime.NumCPU(), GOOS: runtime.GOOS, GOARCH: runtime.GOARCH, Go: runtime.Version()}
}

func (m Machine) String() string {
	return fmt.Sprintf("%d CPUs, %s/%s, %s", m.CPUs, m.GOOS, m.GOARCH, m.Go)
}

// Table is a table in Markdown whose columns line up. The first row names the columns, and all rows have as many cells; an
// empty cell of the others shows as a dash.
func Table(rows [][]string) string {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell), 1)
		}
	}
	var b strings.Builder
	for n, row := range rows {
		for i, cell := range row {
			if cell == "" && n > 0 {
				cell = "–"
			}
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, w := range width {
				b.WriteString("|" + strings.Repeat("-", w+2))
			}
			b.WriteString("|\n")
		}
	}
	return b.String()
}
